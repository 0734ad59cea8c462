"""The device at hand, in words: for people, and as the key of measured times."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch

from autoamp import compat

_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq")
"""Where Linux tells the limits of the clock; absent on most virtual machines."""


def device_name(device: torch.device) -> str:
    """The hardware behind `device`, and how much of a CPU torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    threads = torch.get_num_threads()
    return f"cpu  {_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"


def described(device: torch.device) -> str:
    """All that measured times depend on: another description is another device.

    The hardware, its threads, the highest clock that the system allows it, the formats
    in which torch multiplies fp32 numbers, and the version of torch.
    """
    words = [device_name(device), *_clocks(device), f"torch {torch.__version__}"]
    kinds = compat.tf32_kinds() if device.type == "cuda" else ()
    return ", ".join([*words, *(f"{kind} in TF32" for kind in sorted(kinds))])


def _clocks(device: torch.device) -> list[str]:
    if device.type != "cpu":
        return []
    words = []
    for name in ("scaling_max_freq", "scaling_governor"):
        try:
            words.append((_CLOCK / name).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeError):
            continue
    return words


@functools.cache
def _cpu_model() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return name
