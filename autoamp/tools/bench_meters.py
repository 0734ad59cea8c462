"""What a step holds in memory, and the energy that it takes."""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.errors import OptionError
from autoamp.passes.speeds.clock import finish
from autoamp.tools.bench_step import Running

MEMORY_HOW = {
    "cuda": "the most that torch's allocator held in a step, less the bytes held "
    "before the way was set up",
    "cpu": "weights, optimizer state and low copies, plus the most that torch's "
    "profiler saw allocated in a step",
}
"""How the peak memory is measured, by the type of the device."""

POWERCAP = Path("/sys/class/powercap")

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_LARGEST_BATCH = 2**20
_STDERR = 2

_LEAST_SECONDS = 1.0
"""Steps run this long between two readings; counters move several times a second."""

_HIGH_FLOP, _LOW_FLOP, _BYTE = 2.3e-12, 0.75e-12, 162.5e-12
"""Joules of a flop in fp32 and in 16 bits, and of a byte from memory.

M. Horowitz, "Computing's energy problem" (ISSCC 2014), table for 45 nm: half of a
multiplication and an addition (3.7 + 0.9 pJ, 1.1 + 0.4 pJ), and an eighth of a read of
64 bits from DRAM (1.3 to 2.6 nJ; we take 1.3).
"""

ESTIMATED = (
    "an estimate from flops and bytes, by Horowitz's figures for chips of 45 nm "
    "(2014): use it only to compare the ways"
)


# -- memory ----------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(s in said for s in _OUT_OF_MEMORY)


def bytes_in(given: int | str) -> int:
    """The bytes of a number, or of a text such as "8GiB", "500 MB" or "2g".

    Raises:
        OptionError: `given` is no amount of memory above 0.
    """
    text = str(given).strip().lower()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text)
    units = _BINARY if found and found[3] else _UNITS
    amount = int(float(found[1]) * units[found[2]]) if found else 0
    if amount < 1:
        raise OptionError(
            f"memory={given!r} is no amount of memory: write 8GiB or 500MB"
        )
    return amount


def largest_size(peak: Callable[[int], int | None], budget: int) -> int:
    """The largest size whose peak is within the budget; peaks must grow with the size.

    Args:
        peak: gives the peak of a size in bytes; None where memory runs out.
    """

    def fits(size: int) -> bool:
        found = peak(size)
        return found is not None and found <= budget

    least, most = 0, 1
    while most <= _LARGEST_BATCH and fits(most):
        least, most = most, 2 * most
    most = min(most, _LARGEST_BATCH + 1)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


class Held:
    """The memory that was held on a device when this object was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        self._cuda = self._allocated() if device.type == "cuda" else 0
        self._cpu = _living() if device.type == "cpu" else {}

    def more(self) -> int:
        """Bytes held now that were not held when this object was made."""
        gc.collect()
        if self._device.type == "cuda":
            return self._allocated() - self._cuda
        now = _living() if self._device.type == "cpu" else {}
        return sum(n for key, n in now.items() if key not in self._cpu)

    def peak(self, step: Callable[[], Any]) -> int | None:
        """The most bytes held at one time during `step()`.

        Bytes that were held when this object was made do not count.  None on a device
        on which the memory cannot be measured.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            step()
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device) - self._cuda
        if self._device.type != "cpu":
            return None
        return self.more() + _most_allocated(step)

    def _allocated(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)


def _living() -> dict[int, int]:
    """The memory of all tensors on the CPU: address to bytes, each storage once."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor) or isinstance(each, compat.FakeTensor):
            continue
        if each.device.type == "cpu" and each.layout == torch.strided:
            address, size = compat.storage_span(each)
            found[address] = max(size, found.get(address, 0))
    return found


def _most_allocated(step: Callable[[], Any]) -> int:
    """The most bytes that were allocated during `step()` and not yet freed."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Torch 2.11 warns that events of earlier cycles are lost, where there is but one.
    seen = torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    )
    with _mute():
        seen.start()
    try:
        step()
    finally:
        with _mute():
            seen.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    moves = [(e["ts"], e["args"]) for e in events if e.get("name") == "[memory]"]
    now = most = 0
    for _, move in sorted(moves, key=lambda pair: pair[0]):
        if move["Device Type"] == 0:
            now += move["Bytes"]
            most = max(most, now)
    return most


@contextmanager
def _mute() -> Iterator[None]:
    """A region in which nothing is written to stderr, not even by compiled code.

    Torch's profiler writes two lines of its own whenever it starts and stops.
    """
    try:
        kept = os.dup(_STDERR)
    except OSError:  # the process has no stderr
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), _STDERR)
    try:
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)


# -- energy ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Meter:
    """A counter of energy.

    Attributes:
        kind: "nvml" or "rapl".
        how: a description of what the counter counts.
        joules: reads the counter.
        period: the joules after which the counter restarts at 0.
    """

    kind: str
    how: str
    joules: Callable[[], float]
    period: float = 0.0

    def of_a_step(self, running: Running) -> float:
        """Joules of one step: the mean over the steps that run in a second."""
        finish(running.device)
        start, before, steps = time.perf_counter(), self.joules(), 0
        while time.perf_counter() - start < _LEAST_SECONDS:
            running.step()
            finish(running.device)
            steps += 1
        spent = self.joules() - before
        return (spent + self.period if spent < 0 else spent) / steps


def meter_for(device: torch.device) -> tuple[Meter | None, str]:
    """The energy counter of a device; or None, and why the device has none."""
    counters = {"cuda": _nvml, "cpu": _rapl}
    if device.type not in counters:
        return None, f"no counter of energy is known for {device.type}"
    try:
        return counters[device.type](device), ""
    except (ImportError, OSError, ValueError) as error:
        return None, str(error)


def estimated_joules(figures: dict[str, Any]) -> float | None:
    """Joules of a forward and its backward, from their flops and bytes."""
    flops, low, moved = (figures[name] for name in ("flops", "low_flops", "moved"))
    if None in (flops, low, moved):
        return None
    return float((flops - low) * _HIGH_FLOP + low * _LOW_FLOP + moved * _BYTE)


def _nvml(device: torch.device) -> Meter:
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


def _rapl(_: torch.device) -> Meter:
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
