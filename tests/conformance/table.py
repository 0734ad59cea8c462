"""From the reports of pytest to the table of what was checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report

PART, SUM, WORST = "part", "sum:", "worst:"
HEADER = ("part", "tests", "failed", "skipped", "seconds")


class Figures:
    """What one test counted and measured."""

    def __init__(self, record: Callable[[str, Any], None]) -> None:
        self._record = record

    def count(self, name: str, number: int = 1) -> None:
        """Adds `number` to the part's total of `name`."""
        self._record(SUM + name, int(number))

    def worst(self, name: str, number: float) -> None:
        """Keeps `number` if it is the largest of the part's `name`."""
        self._record(WORST + name, float(number))


@dataclass
class Part:
    """All that is known of one file of tests."""

    tests: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, outcome: str, test: Any) -> None:
        self.seconds += test.duration
        if outcome == "skipped":
            self.skipped[str(test.longrepr[2]).removeprefix("Skipped: ")] += 1
            return
        self.tests += 1
        if outcome != "passed":
            self.failed.append(test.nodeid)
        for key, value in test.user_properties:
            if key.startswith(SUM):
                self.counted[key.removeprefix(SUM)] += value
            elif key.startswith(WORST):
                name = key.removeprefix(WORST)
                self.worst[name] = max(value, self.worst.get(name, value))


def gather(stats: Mapping[str, Sequence[Any]]) -> dict[str, Part]:
    """Part by part, from pytest's reports by outcome."""
    parts: dict[str, Part] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for test in stats.get(outcome, ()):
            name = dict(getattr(test, "user_properties", ())).get(PART)
            if name is not None:
                parts.setdefault(name, Part()).add(outcome, test)
    return dict(sorted(parts.items()))


def markdown(parts: Mapping[str, Part]) -> str:
    """The table, then what was counted, why anything was skipped, and what failed."""
    rows, notes = [], []
    for name, part in parts.items():
        numbers = part.tests, len(part.failed), part.skipped.total()
        rows.append((name, *map(str, numbers), f"{part.seconds:.0f}"))
        found = [f"{n} {kind}" for kind, n in part.counted.items()]
        found += [f"{kind} {x:.3g} at worst" for kind, x in part.worst.items()]
        notes += [f"- {name}: {', '.join(found)}"] if found else []
        notes += [f"- {name}: skipped {n}: {why}" for why, n in part.skipped.items()]
    notes += [f"- failed: {node}" for part in parts.values() for node in part.failed]
    return "\n".join([report.markdown(HEADER, rows), "", *notes])
