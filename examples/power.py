"""The energy of an epoch in fp32 and in mixed precision, at three widths.

"Mixed precision and power consumption" trained a classifier of 525 species of birds on
84,635 images, in fp32 and in mixed precision, and found that mixed precision draws less
for the same task.  This example takes the energy of a training step, and multiplies it
by the steps of such an epoch.

    python examples/power.py
    python examples/power.py --full                  # images of 224 x 224, batch 64
    python examples/power.py --grams-per-kwh 400     # CO2 beside the energy

The energy is read from the GPU's counter (NVML; pip install nvidia-ml-py) or the
processor's (RAPL) where there is one.  These counters count all programs.  Elsewhere
the energy is an estimate from flops and bytes, and is called an estimate.

The exit status is 1 unless each width takes less energy in mixed precision.  A counter
of a processor without 16-bit units may show more, and is not held to that.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autoamp

SPECIES, IMAGES = 525, 84_635
WIDTHS = (8, 16, 32)

POWERCAP = Path("/sys/class/powercap")

LEAST_SECONDS = 1.0
"""Steps run this long between two readings; counters move several times a second."""

HIGH_FLOP, LOW_FLOP, BYTE = 2.3e-12, 0.75e-12, 162.5e-12
"""Joules of a flop in fp32 and in 16 bits, and of a byte from memory.

M. Horowitz, "Computing's energy problem" (ISSCC 2014), table for 45 nm: half of a
multiplication and an addition (3.7 + 0.9 pJ, 1.1 + 0.4 pJ), and an eighth of a read of
64 bits from DRAM (1.3 to 2.6 nJ; we take 1.3).
"""

BACKWARD = 3
"""A step is counted as three forwards: a backward computes two gradients of an op."""


def make_model(width: int) -> nn.Sequential:
    """Four convolutions, each with twice the channels of the one before, and a head."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for step in range(4):
        out = width << step
        layers += [
            nn.Conv2d(channels, out, 3, stride=2, padding=1),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        ]
        channels = out
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, SPECIES)]
    return nn.Sequential(*layers, *head)


def device_line() -> str:
    """The device, and whether it has units for the low dtype."""
    if not torch.cuda.is_available():
        return "This machine has no GPU: bf16 on its processor."
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    units = "has" if capability >= (7, 0) else "has no"
    version = ".".join(map(str, capability))
    return f"{name}, compute capability {version}: it {units} tensor cores. fp16."


# -- the counters ----------------------------------------------------------------------


def nvml_counter() -> Callable[[], float]:
    """Reads the joules that the GPU has taken since its driver was loaded."""
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from None
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


def rapl_counter() -> Callable[[], float]:
    """Reads the joules that all packages of the processor have taken."""
    # A folder such as intel-rapl:0:1 is a part of a package.
    zones = [z for z in POWERCAP.glob("intel-rapl:*") if z.name.count(":") == 1]
    if not zones:
        raise OSError(f"there is no RAPL counter in {POWERCAP}")
    ranges = {z: int((z / "max_energy_range_uj").read_text()) for z in zones}
    last = {z: int((z / "energy_uj").read_text()) for z in zones}
    total = 0

    def joules() -> float:
        nonlocal total
        for zone, most in ranges.items():
            now = int((zone / "energy_uj").read_text())
            # A counter starts again at 0 behind the end of its range.
            total += now - last[zone] if now >= last[zone] else now + most - last[zone]
            last[zone] = now
        return total / 1e6

    return joules


def counter() -> tuple[Callable[[], float] | None, str]:
    """The counter of the device and its name; or None, and why there is none."""
    on_gpu = torch.cuda.is_available()
    try:
        read = nvml_counter() if on_gpu else rapl_counter()
    except (ImportError, OSError) as error:
        return None, f"not measured ({error}), but estimated from flops and bytes"
    return read, "read from NVML" if on_gpu else "read from RAPL"


# -- a step ----------------------------------------------------------------------------


def measured(model: nn.Module, images: Tensor, joules: Callable[[], float]) -> float:
    """Joules of a training step: the mean over the steps that run in a second."""
    optimizer = torch.optim.AdamW(model.parameters())
    species = torch.arange(len(images), device=images.device) % SPECIES

    def step() -> None:
        nn.functional.cross_entropy(model(images), species).backward()
        optimizer.step()
        optimizer.zero_grad()
        if images.is_cuda:
            torch.cuda.synchronize()

    for _ in range(3):  # the first captures the graph, and kernels are chosen
        step()
    begun, before, steps = time.perf_counter(), joules(), 0
    while time.perf_counter() - begun < LEAST_SECONDS:
        step()
        steps += 1
    return (joules() - before) / steps


def estimated(report: autoamp.Report, *, mixed: bool) -> float:
    """Joules of a training step by Horowitz's figures, for chips of 45 nm.

    Args:
        mixed: whether ops are counted as placed, or all in fp32.
    """
    total = 0.0
    for op in report.ops:
        low = mixed and op.is_low
        total += op.flops * (LOW_FLOP if low else HIGH_FLOP)
        total += op.bytes * BYTE / (2 if low else 1)
    casts = sum(each.bytes for each in report.casts) if mixed else 0
    return BACKWARD * (total + casts * BYTE)


def main(argv: list[str] | None = None) -> int:
    """Takes the energy at three widths; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--full", action="store_true", help="images of 224 x 224")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--grams-per-kwh", type=float, help="show CO2 at this rate")
    given = parser.parse_args(argv)
    side, batch = (224, 64) if given.full else (32, 64)

    console = Console(width=80)
    console.print(device_line())
    console.print("Weights stay fp32; products compute in 16 bits.\n")
    table = Table(box=None, title=f"Energy of an epoch of {IMAGES:,} images")
    names = ["width", "parameters", "fp32", "mixed", "mixed / fp32"]
    for name in names + (["CO2 saved"] if given.grams_per_kwh else []):
        table.add_column(name, justify="right", no_wrap=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: Any = {"precision": "fp16" if device == "cuda" else "bf16"}
    read, how = counter()
    held = True
    for width in given.widths:
        model = make_model(width).to(device)
        images = torch.randn(batch, 3, side, side, device=device)
        report = autoamp.explain(model, images, do_no_harm=False, **options)
        if read is None:
            steps = [estimated(report, mixed=mixed) for mixed in (False, True)]
        else:
            plain = measured(model, images, read)
            autoamp.convert(model, do_no_harm=False, **options)
            steps = [plain, measured(model, images, read)]
        epoch = [each * IMAGES / batch / 1e3 for each in steps]
        about = "about " if read is None else ""
        row = [
            f"{width}",
            f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M",
            *(f"{about}{each:.3g} kJ" for each in epoch),
            f"{epoch[1] / epoch[0]:.2f}",
        ]
        if given.grams_per_kwh:
            saved = (epoch[0] - epoch[1]) / 3.6e3 * given.grams_per_kwh
            row.append(f"{saved:.3g} g")
        table.add_row(*row)
        # Without do_no_harm=False only a model that gains on this device is converted.
        pays = autoamp.is_converted(
            autoamp.convert(make_model(width).to(device), **options)
        )
        held = held and (epoch[1] < epoch[0] or (read is not None and not pays))
    console.print(table)
    console.print(f"\nEnergy: {how}.")
    said = "yes" if held else "NO"
    console.print(f"Less energy in mixed precision at each width: {said}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
