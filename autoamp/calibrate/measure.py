"""Times the probes of a device within half a second."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

from autoamp import compat
from autoamp.calibrate.clock import seconds_of
from autoamp.calibrate.probes import Probe, probes

SECONDS = 0.5
"""The time that a measurement may take."""

_FEWEST, _MOST = 3, 15
"""Bounds on the rounds; the first one warms up."""

_AGREE = 2.0
"""The most that the second shortest reading of a probe takes, over the shortest.

With this bound 20 of 20 measurements on an idle CPU counted, and none of 20 beside two
processes that multiply matrices (benchmarks/results/calibration.md).
"""


class NoTimeError(Exception):
    """The device is too slow, or too busy, to be measured in the time there is."""


def measured(
    device: torch.device, low: torch.dtype, seconds: float = SECONDS
) -> dict[str, float]:
    """The nanoseconds of one call of each probe.

    The probes take turns, so that a disturbance spoils one reading of many probes and
    not all readings of one.  A disturbance only makes a reading longer, so the least is
    taken, as the documentation of Python's `timeit` recommends, if another reading
    agrees with it.

    Raises:
        NoTimeError: three rounds take longer than `seconds`, or their readings differ.
        Exception: the device fails.
    """
    begun = time.perf_counter()
    readings: dict[str, list[float]] = defaultdict(list)
    with compat.on_real_numbers():
        every = probes(device, low)
        for number in range(1, _MOST + 1):
            started = time.perf_counter()
            for probe in every:
                readings[probe.name].append(_reading(probe, device))
                if number < _FEWEST and time.perf_counter() - begun > seconds:
                    raise NoTimeError
            now = time.perf_counter()
            if number >= _FEWEST and 2 * now - started - begun > seconds:
                break
    if not all(map(_agree, readings.values())):
        raise NoTimeError
    return {name: min(each) for name, each in readings.items()}


def _agree(readings: list[float]) -> bool:
    least, second = [*sorted(readings), *readings][:2]
    return second <= _AGREE * least


def _reading(probe: Probe, device: torch.device) -> float:
    """The nanoseconds of one call, of all that one reading makes."""

    def calls() -> None:
        for _ in range(probe.times):
            probe.call()

    return 1e9 * seconds_of(calls, device) / probe.times
