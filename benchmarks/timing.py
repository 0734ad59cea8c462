"""Interleaved timing: all ways in each round, ratios in it, medians over the rounds."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def seconds(step: Callable[[], None], device: str) -> float:
    """Wall-clock seconds of one step, the device's queue drained before and after."""
    _drain(device)
    start = time.perf_counter()
    step()
    _drain(device)
    return time.perf_counter() - start


def interleaved(
    steps: Mapping[str, Callable[[], None]], rounds: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Seconds of each step in each round, in turn.

    Each round shuffles the steps, so that no step mostly follows the same other (whose
    memory it finds in the cache, or whose heat it finds in the clock); alike each time.
    """
    order = random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            taken[name].append(seconds(steps[name], device))
    return taken


def ratios(taken: Mapping[str, list[float]], baseline: str) -> dict[str, float]:
    """For each name the median over rounds of its time divided by the baseline's."""
    return {
        name: statistics.median(
            t / b for t, b in zip(times, taken[baseline], strict=True)
        )
        for name, times in taken.items()
    }


_MALLOPT = {-1: -1, -4: 0}
"""glibc's <malloc.h>: never trim, nothing apart by mmap.

One arena for all threads (-8: 1) must not be set: the backward of torch's attention
kernel then takes 72 ms instead of 18 under autocast, which made autoamp look faster."""


def keep_freed_memory() -> bool:
    """Lets malloc keep what is freed, for this process; whether it could (glibc).

    By default every large tensor gets fresh pages, which the kernel zeroes at the first
    touch: much of a CPU's training step, and more noise than the differences looked
    for.  Servers train with an allocator that keeps its memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*each) for each in _MALLOPT.items())


def _drain(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def repeated(step: Callable[[], None], times: int) -> None:
    """Takes a step several times."""
    for _ in range(times):
        step()


def quartiles(one: list[float], other: list[float]) -> list[float]:
    """The quartiles of the ratios of two series, round by round."""
    return statistics.quantiles([a / b for a, b in zip(one, other, strict=True)], n=4)
