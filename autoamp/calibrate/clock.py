"""Times calls on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

_BATCH = 1e-3
"""Seconds that a batch of calls should take: many times the clock's resolution."""

_BATCHES = 5
_ENOUGH = 0.05
"""Seconds after which no further batch is begun."""


_CHANCE = 0.05


def surely_less(mine: Sequence[float], others: Sequence[float]) -> bool:
    """Whether paired times are less so often that chance has a probability below 5 %.

    This is the sign test of paired observations, which assumes no distribution of
    times.
    """
    less = sum(a < b for a, b in zip(mine, others, strict=True))
    rounds = len(mine)
    ways = sum(math.comb(rounds, k) for k in range(less, rounds + 1))
    return bool(ways / 2**rounds <= _CHANCE)


def finish(device: torch.device) -> None:
    """Waits until `device` has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds from the start of one call to the end of its work."""
    finish(device)
    start = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - start


def least_seconds(
    call: Callable[[], object], device: torch.device, *, batches: bool = True
) -> float:
    """The seconds of one call: the least of several readings.

    Disturbances only make a reading longer, so the least is taken and not the mean, as
    the documentation of Python's `timeit` recommends.

    Args:
        call: the function, which is called once before it is timed.
        batches: whether many short calls may be timed together.
    """
    call()
    begun = time.perf_counter()
    best = seconds_of(call, device)
    number = max(1, round(_BATCH / max(best, 1e-7))) if batches else 1

    def batch() -> None:
        for _ in range(number):
            call()

    for _ in range(_BATCHES):
        best = min(best, seconds_of(batch, device) / number)
        if time.perf_counter() - begun > _ENOUGH:
            break
    return best
