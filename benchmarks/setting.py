"""The machine, device and precision of a benchmark, and the names of its results."""

from __future__ import annotations

import argparse
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from autoamp.dtypes import LOW_DTYPES

NO_GPU = "this machine has no GPU that torch can use"
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")


@dataclass(frozen=True)
class Setting:
    """The device, the compute dtype, and whether sizes and rounds are small.

    With `fake` the GPU is one that is not there (`benchmarks/fake_gpu.py`).
    """

    device: str = "cpu"
    precision: str = "bf16"
    quick: bool = False
    fake: bool = False

    @property
    def low(self) -> torch.dtype:
        """The compute dtype."""
        return LOW_DTYPES[self.precision]

    @property
    def full_size(self) -> bool:
        """Whether models have the sizes for a GPU; small ones with `quick`."""
        return self.device != "cpu" or self.quick

    def stem(self, base: str, *, precise: bool = True) -> str:
        """`base` followed by what is not as it is by default on a CPU.

        The results of a GPU are named for that GPU.

        Args:
            base: the name of a table.
            precise: whether there is a table for each compute dtype.
        """
        parts = [base]
        if precise and self != Setting(quick=self.quick):
            parts.append(self.precision)
        if self.fake:
            parts.append("fake-cuda")
        elif self.device != "cpu":
            name = torch.cuda.get_device_properties(self.device).name
            parts.append(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"))
        return "-".join([*parts, *["quick"] * self.quick])

    def arguments(self) -> list[str]:
        """The command-line arguments that `setting_of` makes this setting of."""
        given = ["--device", self.device, "--precision", self.precision]
        return [*given, *["--quick"] * self.quick]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the arguments that say where a benchmark runs."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=tuple(LOW_DTYPES), default="bf16")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")


def setting_of(
    parser: argparse.ArgumentParser, given: argparse.Namespace, *, fake: bool = False
) -> Setting:
    """The setting that was asked for; exits with 2 where there is no such GPU.

    Args:
        fake: whether a GPU need not be there.
    """
    fake = fake and given.device != "cpu"
    if not (fake or usable(given.device)):
        parser.error(NO_GPU)
    return Setting(given.device, given.precision, given.quick, fake)


def usable(device: str) -> bool:
    """Whether torch can use a device here."""
    return device == "cpu" or torch.cuda.is_available()


def capability(device: str) -> str:
    """One line: the processor, its units for low precision, and the torch it ran."""
    if device == "cpu":
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        return f"{_cpu()}; {versions}"
    properties = torch.cuda.get_device_properties(device)
    units = {"fp16 tensor cores": 7, "bf16 tensor cores": 8}
    low = [name for name, major in units.items() if properties.major >= major]
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
    threads = torch.get_num_threads()
    return f"{name}, {os.cpu_count()} cores ({units}), {threads} threads"
