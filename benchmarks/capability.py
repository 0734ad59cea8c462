"""One line that says what machine a figure is from."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")


def capability(device: str) -> str:
    """The processor, what low precision it has units for, and the torch it ran."""
    if device == "cpu":
        return (
            f"{_cpu()}; torch {torch.__version__}, Python {platform.python_version()}"
        )
    properties = torch.cuda.get_device_properties(device)
    low = [
        name
        for name, there in (
            ("fp16 tensor cores", properties.major >= 7),
            ("bf16 tensor cores", properties.major >= 8),
        )
        if there
    ]
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB, "
        f"{', '.join(low) or 'no fp16 or bf16 tensor cores'}; "
        f"{_cpu()}; torch {torch.__version__}, CUDA {torch.version.cuda}"
    )


def _cpu() -> str:
    name, flags = platform.processor() or platform.machine(), set[str]()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
    known = [flag for flag in _CPU_FLAGS if flag in flags]
    low = any("16" in flag for flag in known)
    units = ", ".join(known) + ("" if low else ", no bf16 or fp16 units")
    return (
        f"{name}, {os.cpu_count()} cores ({units}), {torch.get_num_threads()} threads"
    )
