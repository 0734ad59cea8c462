"""`python -m benchmarks.bytes`: bytes that a training step reads and writes.

Each model runs in a process of its own; a finished one is skipped unless `--again`.

`--by-op NAME` prints the bytes of one model operator by operator, autocast and autoamp
side by side: what to fuse is at the top.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from autoamp.counted.traffic import Line, Phase, Traffic, is_cast

from . import bytes_table, report
from .bytes_models import PAPER, WRITTEN, case_of, zoo
from .bytes_step import count_step

BESIDE = ("autocast", "autoamp")
"""The two ways that `--by-op` sets side by side."""


PHASES: tuple[Phase, ...] = ("forward", "backward")


def by_op(name: str, top: int, dtypes: bool = True) -> str:
    """Bytes of one model by operator: a table of the `top` that move the most."""
    counts = {way: count_step(case_of(name), way) for way in BESIDE}
    grouped = {way: _grouped(c.traffic, dtypes) for way, c in counts.items()}
    calls = {way: _grouped_calls(c.traffic, dtypes) for way, c in counts.items()}
    ours, theirs = grouped["autoamp"], grouped["autocast"]
    order = sorted(ours | theirs, key=lambda k: -max(ours[k], theirs[k]))
    rows = []
    for key in order[:top]:
        both = [f"{grouped[way][key] / 1e6:.1f} ({calls[way][key]})" for way in BESIDE]
        rows.append([*key, *both, f"{(ours[key] - theirs[key]) / 1e6:+.1f}"])
    rest = [sum(grouped[way][key] for key in order[top:]) for way in BESIDE]
    rows.append(["", f"{len(order[top:])} more", "", *_differ(*rest)])
    for phase in PHASES:
        totals = [counts[way].traffic.bytes(phase) for way in BESIDE]
        rows.append([phase, "all", "", *_differ(*totals)])
    totals = [counts[way].traffic.bytes() for way in BESIDE]
    rows.append(["step", "all", "", *_differ(*totals)])
    columns = [f"{way} MB (calls)" for way in BESIDE]
    header = ("phase", "op", "dtypes", *columns, "difference")
    return report.markdown(header, rows)


def _differ(theirs: int, ours: int) -> list[str]:
    return [f"{theirs / 1e6:.1f}", f"{ours / 1e6:.1f}", f"{(ours - theirs) / 1e6:+.1f}"]


def _key(line: Line, dtypes: bool) -> Line:
    return line if dtypes or is_cast(line) else line._replace(dtypes="")


def _grouped(traffic: Traffic, dtypes: bool) -> Counter[Line]:
    found: Counter[Line] = Counter()
    for line, moved in traffic.by_line().items():
        found[_key(line, dtypes)] += moved
    return found


def _grouped_calls(traffic: Traffic, dtypes: bool) -> Counter[Line]:
    found: Counter[Line] = Counter()
    for line, calls in traffic.calls.items():
        found[_key(line, dtypes)] += calls
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked and not yet there; 1 if a way to run a model failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bytes")
    parser.add_argument("names", nargs="*", help="models (all of the paper's sizes)")
    parser.add_argument("--zoo", action="store_true", help="the models of tests/zoo")
    parser.add_argument("--again", action="store_true", help="finished models too")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--one", metavar="NAME", help="one model, printed as JSON")
    parser.add_argument("--by-op", metavar="NAME", help="one model, by operator")
    parser.add_argument("--top", type=int, default=25, help="operators of --by-op")
    parser.add_argument(
        "--no-dtypes", action="store_true", help="--by-op adds up all dtypes of an op"
    )
    options = parser.parse_args(arguments)
    if options.by_op:
        print(by_op(options.by_op, options.top, not options.no_dtypes))
        return 0
    if options.one:
        print(json.dumps(bytes_table.measured(options.one)))
        return 0
    names = options.names or [
        *(case.name for case in (*PAPER, *WRITTEN) if not options.zoo),
        *(f"zoo/{case.name}" for case in zoo() if options.zoo),
    ]
    text = bytes_table.fill(names, options.out, again=options.again)
    print(text)
    return int("Not counted:" in text)


if __name__ == "__main__":
    raise SystemExit(main())
