"""Odd training loops under autoamp, beside `torch.autocast` with a `GradScaler`."""

from __future__ import annotations

import functools

import pytest
from torch import Tensor

from tests.quick import each_with_one
from tests.training.odd_loops import (
    FP32,
    GRAD_SCALER,
    LOOPS,
    OURS,
    UNSCALED,
    Outcome,
    run,
)

REAL_SCALES = True
"""The scales are those of a user's training."""

# torch's own: a GradScaler has skipped the first step of a loop with a schedule.
QUIET = "ignore:Detected call of `lr_scheduler.step"

pytestmark = [pytest.mark.filterwarnings(QUIET), pytest.mark.usefixtures("one_thread")]


@functools.cache
def reference(name: str) -> Outcome:
    """What others do; run once for all our ways."""
    return run(name, FP32 if name in UNSCALED else GRAD_SCALER)


def finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


@pytest.mark.parametrize(("name", "way"), each_with_one(LOOPS, OURS))
def test_no_worse_than_a_grad_scaler(name: str, way: str) -> None:
    """No step is skipped that it takes, and everything is finite, buffers too.

    CI has each loop in one way, in turn: cases of one loop lie side by side.
    """
    theirs, ours = reference(name), run(name, way)
    assert ours.taken >= theirs.taken
    assert ours.state.keys() >= theirs.state.keys()
    assert [key for key, value in ours.state.items() if not finite(value)] == []
    assert [n for n, value in enumerate(ours.seen) if not finite(value)] == []
    assert all(value.any() for value in ours.seen)


@pytest.mark.parametrize("name", LOOPS)
def test_the_reference_trains(name: str) -> None:
    """A loop that trains nothing beside a GradScaler would say nothing about ours."""
    theirs = reference(name)
    assert theirs.taken > 0
    assert all(finite(value) and value.any() for value in theirs.seen)
