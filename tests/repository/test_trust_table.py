"""The table of the conformance tests counts what they say, failures and skips too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.conformance.table import PART, Figures, as_json, gather, markdown


def reported(part: str, fill: Any = None, **more: Any) -> Any:
    """What pytest hands over of one test of `part`."""
    properties: list[tuple[str, Any]] = [(PART, part)]
    if fill is not None:
        fill(Figures(lambda name, value: properties.append((name, value))))
    return SimpleNamespace(user_properties=properties, duration=0.5, **more)


def counting(ops: int, error: float) -> Any:
    def fill(figures: Figures) -> None:
        figures.count("ops", ops)
        figures.worst("error", error)

    return fill


STATS = {
    "passed": [
        reported("Ops", counting(3, 0.25)),
        reported("Ops", counting(4, 0.5)),
        SimpleNamespace(user_properties=[], duration=9.0),  # of no part
    ],
    "failed": [reported("Ops", counting(0, 0.1), nodeid="test_ops.py::test_exp")],
    "skipped": [
        reported("Ops", longrepr=("test_ops.py", 7, "Skipped: torch has none"))
    ],
    "error": [reported("Models", nodeid="test_models.py::test_vit")],
    "deselected": [object()],
}


def test_counts_are_added_up_and_the_worst_is_kept() -> None:
    parts = gather(STATS)
    assert [*parts] == ["Models", "Ops"]
    ops = parts["Ops"]
    assert (ops.passed, ops.failed) == (2, ["test_ops.py::test_exp"])
    assert ops.counted == {"ops": 7}
    assert ops.worst == {"error": 0.5}
    assert ops.skipped == {"torch has none": 1}
    assert ops.seconds == 2.0
    assert parts["Models"].failed == ["test_models.py::test_vit"]


def test_the_table_tells_all_of_it() -> None:
    parts = gather(STATS)
    text = markdown(parts)
    row = next(line for line in text.splitlines() if line.startswith("| Ops"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["Ops", "3", "1", "1", "2"]
    assert "- Ops: 7 ops, error 0.5 at worst" in text
    assert "- Ops: skipped 1: torch has none" in text
    assert "- failed: test_models.py::test_vit" in text
    assert as_json(parts)["Ops"]["skipped"] == {"torch has none": 1}
