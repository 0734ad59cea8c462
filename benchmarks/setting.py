"""Where and in what precision a benchmark runs, and how that names its results."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import torch

from autoamp.dtypes import LOW_DTYPES

from .capability import capability

NO_GPU = "this machine has no GPU that torch can use"


@dataclass(frozen=True)
class Setting:
    """The device, the compute dtype, and whether sizes and rounds are small."""

    device: str = "cpu"
    precision: str = "bf16"
    quick: bool = False

    @property
    def low(self) -> torch.dtype:
        """The compute dtype."""
        return LOW_DTYPES[self.precision]

    @property
    def full_size(self) -> bool:
        """Whether the models are those of `gpu_cases.py`, with `quick` small ones."""
        return self.device != "cpu" or self.quick

    @property
    def capability(self) -> str:
        """The line that says what machine the figures are from."""
        return capability(self.device)

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
        if self.device != "cpu":
            parts.append(device_slug(self.device))
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


def setting_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Setting:
    """The setting that was asked for; exits with 2 where there is no such GPU."""
    if not usable(given.device):
        parser.error(NO_GPU)
    return Setting(given.device, given.precision, given.quick)


def usable(device: str) -> bool:
    """Whether torch can use a device here."""
    return device == "cpu" or torch.cuda.is_available()


def device_slug(device: str) -> str:
    """The name of a device as a part of a file's name: "nvidia-h100-80gb-hbm3"."""
    if device == "cpu":
        return device
    name = torch.cuda.get_device_properties(device).name
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
