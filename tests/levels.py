"""Which tests are quick, by the times of a run; and a reader of such times.

`make test` runs the quick tests, CI the thorough ones after them, `make test-all` the
slow ones too.  The rule, for seconds of an idle core, in which fixtures count:

1. All cases of a test function together take at most `SECONDS`, or the function is
   `thorough`.  Up to six of its cases stay quick, as many as fit into these seconds:
   `@pytest.mark.thorough(but=["case", ...])`.
2. One function of each file may take longer, the quickest of those that do: each file
   keeps quick tests of what it is for.

    pytest -n 2 -m "not slow and not gpu and not conformance" --junitxml=times.xml
    python -m tests.levels times.xml
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

SECONDS = 0.7
OTHERS = ("slow", "gpu", "conformance")
"""Marks of tests that have commands of their own, and are never thorough as well."""

Cases = dict[str, list[tuple[str, bool]]]
"""The cases of each test function, and whether each is quick."""

CASES = pytest.StashKey[Cases]()
EXCEPTED = pytest.StashKey[set[tuple[str, str]]]()
"""What a run collected, before tests were chosen."""


def case_of(name: str) -> str:
    """`a-b` for `test_x[a-b]`, "" for `test_x`."""
    return name.partition("[")[2][:-1]


def function_of(name: str) -> str:
    return name.partition("[")[0]


def settle(items: Iterable[pytest.Item]) -> Cases:
    """Takes the mark `thorough` from cases that it excepts, and from slow tests.

    Returns:
        The tests that are neither slow nor for other commands.
    """
    found: Cases = defaultdict(list)
    for item in items:
        others = any(item.get_closest_marker(name) for name in OTHERS)
        item.own_markers = [
            mark
            for mark in item.own_markers
            if mark.name != "thorough"
            or not (others or case_of(item.name) in mark.kwargs.get("but", ()))
        ]
        if not others:
            quick = item.get_closest_marker("thorough") is None
            found[function_of(item.nodeid)].append((case_of(item.name), quick))
    return found


def excepted(items: Iterable[pytest.Item]) -> set[tuple[str, str]]:
    """(test function, case) of each case that a mark `thorough` names."""
    return {
        (function_of(item.nodeid), case)
        for item in items
        for mark in item.iter_markers("thorough")
        for case in mark.kwargs.get("but", ())
    }


def times_of(junit: Path) -> dict[str, list[float]]:
    """The seconds of all cases of each test function, `file::function`."""
    found: dict[str, list[float]] = defaultdict(list)
    for case in ET.parse(junit).iter("testcase"):
        file = (case.get("classname") or "").replace(".", "/") + ".py"
        name = function_of(case.get("name") or "")
        found[f"{file}::{name}"].append(float(case.get("time") or 0))
    return found


def main(junit: Path) -> None:
    """Prints the functions that break the rule, the longest first."""
    times = times_of(junit)
    over = {name: sum(each) for name, each in times.items() if sum(each) > SECONDS}
    for names in by_file(over).values():
        del over[min(names, key=over.__getitem__)]
    for name in sorted(over, key=lambda name: -over[name]):
        print(f"{over[name]:6.1f} s in {len(times[name]):3d} cases  {name}")
    print(f"{sum(sum(t) for t in times.values()):6.1f} s in all")


def by_file(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[name.partition("::")[0]].append(name)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
