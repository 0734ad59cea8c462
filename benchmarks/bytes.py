"""`python -m benchmarks.bytes`: bytes that a training step reads and writes.

Each model runs in a process of its own; a finished one is skipped unless `--again`.

`--by-op NAME` prints the bytes of one model operator by operator, autocast and autoamp
side by side: what to fuse is at the top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from autoamp.tools.count import Phase

from . import processes, report
from .bars import bytes_svg
from .bytes_step import WARM_UP, WAYS, count_step
from .models import PAPER, WRITTEN, case_of, zoo
from .processes import Row, failures, mean, new_row, ratio
from .report import said
from .setting import Setting
from .traffic import Line, Traffic, is_cast
from .ways import CPU_BF16

KINDS = ("step", "forward", "saved")
"""The figures of which the table gives the ratio of autoamp to autocast."""

HEADER = (
    "model",
    *(f"{way}, MB" for way in WAYS),
    *(f"autoamp / autocast, {kind}" for kind in KINDS),
)

NOTE = f"""\
Bytes that kernels read and write in one training step, forward and backward, without
the optimizer, counted at the dispatcher; 1 MB is 10^6 bytes. Views count nothing, a
broadcast dimension counts once, a fused kernel counts its inputs and outputs. Every
column has the same batch and the model's own loss; dropout is 0. The step counted
comes after {WARM_UP} steps of an optimizer, which changed all weights: the refresh of
autoamp's low copies of the weights is included (in the forward), as autocast's casts
are.
"saved" is the bytes saved for the backward. "_written" has its attention written out,
as transformers' `attn_implementation="eager"` has it; on a CPU with units for bf16,
whose products are faster than its kernel of attention, it stays written out.

A convolution in bf16 whose images have their channels first permutes them in its
kernel, where this count does not look; autoamp permutes outside, where it does.
oneDNN's own log has 2332 MB of reorders in a step of ResNet-50 on 8 images under
autocast and 421 MB by autoamp, so that a convolutional net slightly above 1 here moves
fewer bytes in fact."""


def measured(name: str, _: Setting = CPU_BF16) -> Row:
    """The figures of one model, way by way; a way that fails has its error instead."""
    row = new_row(name)
    for way in WAYS:
        torch._dynamo.reset()
        try:
            row["ways"][way] = count_step(case_of(name), way).as_json()
        except Exception as error:  # noqa: BLE001 - the other ways are still counted
            row["failures"][way] = said(error)
    return row


def is_of_the_zoo(row: Row) -> bool:
    """Whether the model of a row is one of tests/zoo."""
    return bool(row["name"].startswith("zoo/"))


def text(rows: Sequence[Row], _: Setting, machine: str) -> str:
    """The page: the paper's models, those with attention written out, and the zoo's."""
    kinds: dict[str, list[Row]] = {"paper": [], "written": [], "zoo": []}
    for row in rows:
        written = row["name"].endswith("_written")
        kind = "written" if written else "zoo" if is_of_the_zoo(row) else "paper"
        kinds[kind].append(row)
    tables = [table(each) for each in kinds.values() if each]
    told = ["Not counted:"] * bool(failures(rows))
    return processes.page(rows, machine, NOTE, *tables, *told)


def plot(rows: Sequence[Row]) -> str:
    """The plot of the paper's models and of the zoo's."""
    zoos = [row for row in rows if is_of_the_zoo(row)]
    rest = [row for row in rows if row not in zoos]
    return bytes_svg([r for r in rest if not r["name"].endswith("_written")], zoos)


def table(rows: Sequence[Row]) -> str:
    """The Markdown table, with the geometric means of its ratios at the foot."""
    cells = [
        [
            row["name"],
            *(_megabytes(row, way) for way in WAYS),
            *(_ratio(ratio(row, kind)) for kind in KINDS),
        ]
        for row in rows
    ]
    means = [_ratio(mean(rows, kind)) for kind in KINDS]
    return report.markdown(
        HEADER, [*cells, ["geometric mean", *("" for _ in WAYS), *means]]
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _megabytes(row: Row, way: str) -> str:
    return _in_mb(row["ways"][way]["step"]) if way in row["ways"] else "failed"


def _in_mb(count: float) -> str:
    value = count / 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _brief(row: Row) -> str:
    figures = ", ".join(f"{way} {_megabytes(row, way)}" for way in WAYS)
    failures = "".join(f"; {way}: {why}" for way, why in row["failures"].items())
    return f"{figures} MB; autoamp / autocast {_ratio(ratio(row, 'step'))}{failures}"


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


def names(_: Setting) -> list[str]:
    """The models of the paper's sizes."""
    return [case.name for case in (*PAPER, *WRITTEN)]


TABLE = processes.ModelTable(
    "bytes", names, measured, text, _brief, plot, anywhere=False
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked and not yet there; 1 if a way to run a model failed."""
    parser = TABLE.parser()
    parser.add_argument("--zoo", action="store_true", help="the models of tests/zoo")
    parser.add_argument("--by-op", metavar="NAME", help="one model, by operator")
    parser.add_argument("--top", type=int, default=25, help="operators of --by-op")
    parser.add_argument(
        "--no-dtypes", action="store_true", help="--by-op adds up all dtypes of an op"
    )
    given = parser.parse_args(arguments)
    if given.by_op:
        print(by_op(given.by_op, given.top, not given.no_dtypes))
        return 0
    if given.zoo and not given.names:
        given.names = [f"zoo/{case.name}" for case in zoo()]
    return TABLE.run(parser, given)


if __name__ == "__main__":
    raise SystemExit(main())
