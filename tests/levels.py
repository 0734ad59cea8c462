"""Which tests are quick: those whose measured times leave room for them.

`make test` runs the quick tests, CI the thorough ones after them, `make test-all` the
slow ones too.  `times.json` has the seconds of a whole run, in which fixtures count, of
the test functions whose cases take more than `SECONDS` together.  From it follows:

1. A function that is not in it is quick.
2. Of one that is, those cases are quick that fit into `SECONDS` together, the fastest
   first; the others are `thorough`.
3. Of those in one file, the fastest case is quick whatever it takes, so that each file
   keeps a quick test of what it is for.

One command writes it anew, after a run on an idle machine:

    pytest -n 2 -m "not slow and not gpu and not conformance" --junitxml=times.xml
    python -m tests.levels times.xml
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

SECONDS = 0.5
OTHERS = ("slow", "gpu", "conformance")
"""Marks of tests that have commands of their own, and are never thorough as well."""

TIMES = Path(__file__).with_name("times.json")

Times = dict[str, dict[str, float]]
"""Seconds of each case of each test function: `file::function`, then the case."""


def case_of(name: str) -> str:
    """`a-b` for `test_x[a-b]`, "" for `test_x`."""
    return name.partition("[")[2][:-1]


def function_of(name: str) -> str:
    return name.partition("[")[0]


def times_of(junit: Path) -> Times:
    """The times of a run, as pytest's `--junitxml` writes them."""
    found: Times = defaultdict(dict)
    for case in ET.parse(junit).iter("testcase"):
        file = (case.get("classname") or "").replace(".", "/") + ".py"
        name = case.get("name") or ""
        seconds = float(case.get("time") or 0)
        found[f"{file}::{function_of(name)}"][case_of(name)] = seconds
    return found


def read() -> Times:
    """The times that are committed."""
    found: Times = json.loads(TIMES.read_text())
    return found


def long(times: Times) -> Times:
    """Those functions whose cases take more than `SECONDS` together."""
    return {name: each for name, each in times.items() if sum(each.values()) > SECONDS}


def quick_cases(times: Times) -> dict[str, set[str]]:
    """The cases that are quick, of each function in `times`."""
    found: dict[str, set[str]] = {}
    fastest: dict[str, tuple[float, str, str]] = {}
    for name, each in times.items():
        file, room = name.partition("::")[0], SECONDS
        in_order = sorted((seconds, case) for case, seconds in each.items())
        first = (in_order[0][0], name, in_order[0][1])
        fastest[file] = min(first, fastest.get(file, first))
        found[name] = set()
        for seconds, case in in_order:
            room -= seconds
            if room >= 0:
                found[name].add(case)
    for _, name, case in fastest.values():
        found[name].add(case)
    return found


def mark(items: Iterable[pytest.Item], times: Times) -> None:
    """Gives the mark `thorough` to each test that is not quick by its times."""
    quick = quick_cases(times)
    for item in items:
        chosen = quick.get(function_of(item.nodeid))
        if chosen is None or case_of(item.nodeid) in chosen:
            continue
        if not any(item.get_closest_marker(name) for name in OTHERS):
            item.add_marker(pytest.mark.thorough)


def main(junit: Path) -> None:
    """Writes `times.json` and says how long the quick tests take by it."""
    times = times_of(junit)
    kept = long(times)
    text = json.dumps({n: kept[n] for n in sorted(kept)}, indent=1, sort_keys=True)
    TIMES.write_text(text + "\n")
    quick = quick_cases(kept)
    seconds = 0.0
    for name, each in times.items():
        chosen = quick.get(name)
        seconds += sum(
            t for case, t in each.items() if chosen is None or case in chosen
        )
    every = sum(sum(each.values()) for each in times.values())
    print(f"{len(kept)} of {len(times)} functions take more than {SECONDS} s")
    print(f"quick {seconds:.0f} s, all {every:.0f} s of one core")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
