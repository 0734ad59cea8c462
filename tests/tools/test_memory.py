"""What is alive in a training step, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from torch import nn

from benchmarks.memory import count_step
from tests.models.case import Case, distance, normal

SIZE, ROWS = 300, 10
WEIGHT = 4 * SIZE * SIZE
CASE = Case(
    "linears",
    lambda: nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))),
    normal(ROWS, SIZE),
    distance,
)


@pytest.mark.parametrize(
    ("way", "weights", "in_graph"),
    [
        ("fp32", 2 * WEIGHT, 0),
        # The first weight's copy is not saved: the batch needs no gradient.
        ("autocast", 2 * WEIGHT, WEIGHT // 2),
        ("autoamp", 2 * WEIGHT, WEIGHT // 2),
        ("bfloat16", WEIGHT, 0),
    ],
)
def test_each_kind_is_counted(way: str, weights: int, in_graph: int) -> None:
    moments = count_step(CASE, way)
    for found in moments.values():
        assert found["weights"] == weights
        assert found["state"] == 2 * weights + 2 * 4  # each weight's number of steps
    for moment in ("before", "end", "step"):
        assert moments[moment]["copies"] == 0
    assert moments["loss"]["copies"] == in_graph
    assert moments["loss"]["gradients"] == moments["before"]["saved"] == 0
    assert moments["end"]["gradients"] == moments["step"]["gradients"] == weights
    assert moments["middle"]["gradients"] == weights // 2
    # The second product's operand, and the distance of the result from its target.
    product = ROWS * SIZE * (4 if way == "fp32" else 2)
    assert moments["loss"]["saved"] >= product + ROWS * SIZE * 4
    assert moments["end"]["saved"] == 0
    totals = [found.total() for found in moments.values()]
    assert moments["peak"].total() == max(totals)
    assert moments["step"].total() > moments["end"].total()
