"""Times the probes of a device within half a second."""

from __future__ import annotations

import time

import torch

from autoamp import compat
from autoamp.calibrate.clock import finish
from autoamp.calibrate.probes import Probe, probes

SECONDS = 0.5
"""The time that a measurement may take."""

_MOST_ROUNDS = 15


class NoTimeError(Exception):
    """The device is too slow, or too busy, for two rounds in the time there is."""


def measured(
    device: torch.device, low: torch.dtype, seconds: float = SECONDS
) -> dict[str, float]:
    """The nanoseconds of one call of each probe.

    The probes take turns, so that a disturbance spoils one reading of many probes and
    not all readings of one.  A disturbance only makes a reading longer, so the least is
    taken, as the documentation of Python's `timeit` recommends.

    Raises:
        NoTimeError: two rounds take longer than `seconds`.
        Exception: the device fails.
    """
    begun = time.perf_counter()
    with compat.on_real_numbers():
        every = probes(device, low)
        least = {probe.name: float("inf") for probe in every}
        for number in range(_MOST_ROUNDS):
            started = time.perf_counter()
            for probe in every:
                least[probe.name] = min(least[probe.name], _reading(probe, device))
                if time.perf_counter() - begun > seconds:
                    if number > 1:
                        return least
                    raise NoTimeError
            finished = time.perf_counter()
            is_last = finished - begun + (finished - started) > seconds
            if is_last and number > 0:
                break
    return least


def _reading(probe: Probe, device: torch.device) -> float:
    finish(device)
    start = time.perf_counter_ns()
    for _ in range(probe.times):
        probe.call()
    finish(device)
    return (time.perf_counter_ns() - start) / probe.times
