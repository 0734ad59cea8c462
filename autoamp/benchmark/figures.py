"""Counts the figures of one way: memory, casts, flops, losses."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch

from autoamp.benchmark.memory import Held
from autoamp.benchmark.step.running import Running
from autoamp.calibrate.clock import finish
from autoamp.counted.ops import CountingMode
from autoamp.counted.saved import saved_bytes
from autoamp.counted.traffic import TrafficMode

SEED = 0
"""The seed of the random generators in each way, so that dropout masks are equal."""

_WARM_UP = 2
"""The least steps before the counted step: the first captures, the second settles."""


@dataclass(frozen=True)
class Figures:
    """The counted figures of one way; None where a figure cannot be counted.

    Attributes:
        first_call: seconds of the first step.
        losses: the loss of each of the first steps, where the steps train.
        peak: the most memory held at one time in a step, in bytes.
        resident: bytes of `peak` that are held between steps too.
        saved: bytes saved for the backward.
        moved: bytes that kernels of forward and backward read and write.
        casts: casts that forward and backward run.
        flops: flops of matrix products, convolutions and attention.
        low_flops: the part of `flops` in a low dtype.
    """

    first_call: float
    losses: tuple[float, ...]
    peak: int | None
    resident: int
    saved: int | None
    moved: int | None
    casts: int | None
    flops: int | None
    low_flops: int | None


def figures_of(running: Running, held: Held, steps: int) -> Figures:
    """Runs the first steps of a way, then counts one more step.

    Bytes and casts of the optimizer's own kernels do not count.

    Args:
        held: the memory that was held before the way was set up.
        steps: the number of losses to note.
    """
    torch.manual_seed(SEED)
    running.rewind()
    losses = []
    first = 0.0
    for _ in range(max(steps, _WARM_UP)):
        batch = running.batch()
        start = time.perf_counter()
        losses.append(running.step(batch))
        finish(running.device)
        first = first or time.perf_counter() - start
        del batch
    kept = [loss.item() for loss in losses[:steps] if loss is not None]
    del losses
    peak = held.peak(lambda: running.step(running.batch()))
    resident = held.more()
    seen = None if running.way.compiled else _counted(running)
    saved = _saved(running) if running.task.trains else None
    return Figures(
        first,
        tuple(kept),
        peak,
        resident,
        saved,
        *(seen or (None, None, None, None)),
    )


def _counted(running: Running) -> tuple[int, int, int, int]:
    """Bytes moved, casts, flops and low flops of a forward and its backward."""
    batch = running.batch()
    with CountingMode(running.model.parameters()) as counting, TrafficMode() as traffic:
        running.backward(batch)
    running.forget()
    counts = counting.counts
    return (
        traffic.traffic.bytes(),
        counts.total_casts,
        counts.flops.total(),
        counts.low_flops,
    )


def _saved(running: Running) -> int:
    """Bytes that one forward saves for its backward, without weights."""
    forward = partial(running.forward, running.batch())
    return saved_bytes(forward, running.model.parameters()).total
