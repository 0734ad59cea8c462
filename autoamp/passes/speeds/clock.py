"""The device at hand: its name, and the times that calls take on it."""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from autoamp import compat
from autoamp.passes.decide.devices import kind_of

_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq")
"""Where Linux tells the limits of the clock; absent on most virtual machines."""

_CHANCE = 0.05


def device_name(device: torch.device) -> str:
    """The hardware behind `device`, and how much of a CPU torch uses."""
    if kind_of(device).is_asynchronous:
        return str(torch.get_device_module(device).get_device_name(device))
    if device.type != "cpu":
        return str(device)
    threads = torch.get_num_threads()
    return f"cpu  {_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"


def described(device: torch.device) -> str:
    """All that measured times depend on: another description is another device.

    The hardware, its threads, the highest clock that the system allows it, the formats
    in which torch multiplies fp32 numbers, and the version of torch.
    """
    clocks = []
    files = ("scaling_max_freq", "scaling_governor") if device.type == "cpu" else ()
    for name in files:
        with contextlib.suppress(OSError, UnicodeError):
            clocks.append((_CLOCK / name).read_text(encoding="utf-8").strip())
    words = [device_name(device), *clocks, f"torch {torch.__version__}"]
    kinds = compat.tf32_kinds() if kind_of(device).has_tf32 else ()
    return ", ".join([*words, *(f"{kind} in TF32" for kind in sorted(kinds))])


@functools.cache
def _cpu_model() -> str:
    # On Linux `platform.processor()` is empty, or names the architecture alone.
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def finish(device: torch.device) -> None:
    """Waits until `device` has finished all its work."""
    if kind_of(device).is_asynchronous:
        torch.get_device_module(device).synchronize(device)


def seconds_of(
    call: Callable[[], object], device: torch.device, times: int = 1
) -> float:
    """Wall-clock seconds of one of `times` calls, until the device is done."""
    # Work that is queued already would count as the call's.
    finish(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    finish(device)
    return (time.perf_counter() - start) / times


def surely_less(mine: Sequence[float], others: Sequence[float]) -> bool:
    """Whether paired times are less so often that chance has a probability below 5 %.

    This is the sign test of paired observations, which assumes no distribution of
    times.
    """
    less = sum(a < b for a, b in zip(mine, others, strict=True))
    rounds = len(mine)
    # The upper tail of a binomial distribution: without a difference each round is a
    # fair coin.
    ways = sum(math.comb(rounds, k) for k in range(less, rounds + 1))
    return bool(ways / 2**rounds <= _CHANCE)
