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

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def gather(stats: Mapping[str, Sequence[Any]]) -> dict[str, Part]:
    """Part by part, from pytest's reports by outcome."""
    parts: dict[str, Part] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for each in stats.get(outcome, ()):
            properties = getattr(each, "user_properties", [])
            name = dict(properties).get(PART)
            if name is None:
                continue
            part = parts.setdefault(name, Part())
            part.seconds += each.duration
            if outcome == "passed":
                part.passed += 1
            elif outcome == "skipped":
                part.skipped[_reason(each)] += 1
            else:
                part.failed.append(each.nodeid)
            for key, value in properties:
                if key.startswith(SUM):
                    part.counted[key.removeprefix(SUM)] += value
                elif key.startswith(WORST):
                    kind = key.removeprefix(WORST)
                    part.worst[kind] = max(value, part.worst.get(kind, value))
    return dict(sorted(parts.items()))


def _reason(skipped: Any) -> str:
    return str(skipped.longrepr[2]).removeprefix("Skipped: ")


def markdown(parts: Mapping[str, Part]) -> str:
    """The table, then what was counted, why anything was skipped, and what failed."""
    rows = [
        (
            name,
            str(part.passed + len(part.failed)),
            str(len(part.failed)),
            str(part.skipped.total()),
            f"{part.seconds:.0f}",
        )
        for name, part in parts.items()
    ]
    notes = []
    for name, part in parts.items():
        found = [f"{n} {kind}" for kind, n in part.counted.items()]
        found += [f"{kind} {x:.3g} at worst" for kind, x in part.worst.items()]
        notes += [f"- {name}: {', '.join(found)}"] if found else []
        notes += [f"- {name}: skipped {n}: {why}" for why, n in part.skipped.items()]
    notes += [f"- failed: {node}" for part in parts.values() for node in part.failed]
    return "\n".join([report.markdown(HEADER, rows), "", *notes])


def as_json(parts: Mapping[str, Part]) -> dict[str, Any]:
    """The same, as JSON holds it."""
    return {
        name: {
            "passed": part.passed,
            "failed": part.failed,
            "skipped": dict(part.skipped),
            "counted": dict(part.counted),
            "worst": part.worst,
            "seconds": round(part.seconds, 1),
        }
        for name, part in parts.items()
    }
