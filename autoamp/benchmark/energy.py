"""The energy of a step: read from a counter of the machine, or estimated."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoamp.benchmark.figures import Figures
from autoamp.benchmark.step.running import Running
from autoamp.calibrate.clock import finish

POWERCAP = Path("/sys/class/powercap")

_LEAST_SECONDS = 1.0
"""Steps run this long between two readings; counters move several times a second."""

_PICO = 1e-12
_HIGH_FLOP, _LOW_FLOP, _BYTE = 2.3 * _PICO, 0.75 * _PICO, 162.5 * _PICO
"""Joules of a flop in fp32 and in 16 bits, and of a byte from memory.

M. Horowitz, "Computing's energy problem" (ISSCC 2014), table for 45 nm: half of a
multiplication and an addition (3.7 + 0.9 pJ, 1.1 + 0.4 pJ), and an eighth of a read of
64 bits from DRAM (1.3 to 2.6 nJ; we take 1.3).
"""

_ESTIMATED = (
    "an estimate from flops and bytes, by Horowitz's figures for chips of 45 nm "
    "(2014): use it only to compare the ways"
)


@dataclass(frozen=True)
class Meter:
    """A counter of energy.

    Attributes:
        kind: "nvml" or "rapl".
        how: a description of what the counter counts.
        joules: reads the counter.
        period: the joules after which the counter restarts at 0; None if never.
    """

    kind: str
    how: str
    joules: Callable[[], float]
    period: float | None = None

    def of_a_step(self, running: Running) -> float:
        """Joules of one step: the mean over the steps that run in a second."""
        finish(running.device)
        start, before, steps = time.perf_counter(), self.joules(), 0
        while time.perf_counter() - start < _LEAST_SECONDS:
            running.step(running.batch())
            finish(running.device)
            steps += 1
        spent = self.joules() - before
        if spent < 0 and self.period is not None:
            spent += self.period
        return spent / steps


def meter_for(device: torch.device) -> tuple[Meter | None, str]:
    """The energy counter of a device; or None, and why the device has none."""
    try:
        if device.type == "cuda":
            return _nvml(device), ""
        if device.type == "cpu":
            return _rapl(), ""
    except (ImportError, OSError, ValueError) as error:
        return None, str(error)
    return None, f"no counter of energy is known for {device.type}"


def estimate(figures: Figures) -> float | None:
    """Joules of a forward and its backward, from their flops and bytes."""
    if figures.moved is None or figures.flops is None or figures.low_flops is None:
        return None
    high = figures.flops - figures.low_flops
    return high * _HIGH_FLOP + figures.low_flops * _LOW_FLOP + figures.moved * _BYTE


def described(meter: Meter | None, why_not: str, *, estimated: bool) -> str:
    """How the energy was measured, in words."""
    if meter is not None:
        return meter.how
    return f"not measured ({why_not})" + (
        f"; the joules are {_ESTIMATED}" if estimated else ""
    )


def co2_grams(joules: float, grams_per_kwh: float) -> float:
    """Grams of CO2 of 1,000 steps."""
    return joules * 1000 / 3.6e6 * grams_per_kwh


def _nvml(device: torch.device) -> Meter:
    """The counter of an NVIDIA GPU.

    Raises:
        ImportError: `nvidia-ml-py` (the extra `bench`) is not installed.
        OSError: the driver gives no energy.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        why = "pip install 'autoamp[bench]' to read a GPU's counter"
        raise ImportError(why) from None
    try:
        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from None

    def joules() -> float:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

    how = "the GPU's own counter (NVML), which counts all programs on the GPU"
    return Meter("nvml", how, joules)


def _rapl() -> Meter:
    """The counters of this machine's processor packages.

    Raises:
        OSError: the machine has no counters, or they cannot be read.
    """
    folders = POWERCAP.iterdir() if POWERCAP.is_dir() else ()
    zones = [z for z in folders if re.fullmatch(r"intel-rapl:\d+", z.name)]
    if not zones:
        raise OSError(f"this machine shows no RAPL counter in {POWERCAP}")
    files = [zone / "energy_uj" for zone in zones]

    def joules() -> float:
        return sum(int(file.read_text()) for file in files) / 1e6

    try:
        joules()
        ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
    except PermissionError:
        raise OSError(f"only root may read {files[0]}") from None
    # The counters of several packages restart one by one: a step down means that one
    # has, and the smallest range is added.
    how = "the processor's own counter (RAPL), which counts all programs on it"
    return Meter("rapl", how, joules, min(ranges) / 1e6)
