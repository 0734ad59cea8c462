"""The energy of an epoch in fp32 and in mixed precision, at three widths.

"Mixed precision and power consumption" trained a classifier of 525 species of birds on
84,635 images, in fp32 and in mixed precision, and found that mixed precision draws less
for the same task.  This example takes the energy of a step with `autoamp.bench`, and
multiplies it by the steps of such an epoch.

    python examples/power.py
    python examples/power.py --full      # images of 224 x 224, batch 64

The energy is read from the GPU's counter (NVML) or the processor's (RAPL) where there
is one.  Elsewhere it is an estimate from flops and bytes, and is called an estimate.

The exit status is 1 unless each width takes less energy in mixed precision.  A counter
of a processor without 16-bit units may show more, and is not held to that.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import autoamp

SPECIES, IMAGES = 525, 84_635
WIDTHS = (8, 16, 32)


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


def measured(width: int, side: int, batch: int) -> autoamp.Bench:
    """A training step at one width, in fp32 and converted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    low = "fp16" if device == "cuda" else "bf16"
    return autoamp.bench(
        make_model(width).to(device),
        torch.randn(batch, 3, side, side, device=device),
        precision=low,
        do_no_harm=False,
        ways=["autoamp"],
        rounds=1,
        steps=1,
    )


def main(argv: list[str] | None = None) -> int:
    """Takes the energy at three widths; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--full", action="store_true", help="images of 224 x 224")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    given = parser.parse_args(argv)
    side, batch = (224, 64) if given.full else (32, 64)

    console = Console(width=80)
    console.print(device_line())
    console.print("Weights stay fp32; products compute in 16 bits.\n")
    table = Table(box=None, title=f"Energy of an epoch of {IMAGES:,} images")
    for name in ("width", "parameters", "fp32", "mixed", "mixed / fp32", "moved"):
        table.add_column(name, justify="right", no_wrap=True)
    held = True
    for width in given.widths:
        bench = measured(width, side, batch)
        fp32, ours = (bench.row(way, batch) for way in ("fp32", "autoamp"))
        if not (fp32.joules and ours.joules and fp32.moved and ours.moved):
            console.print(f"No energy is known at width {width}: {bench.energy_how}")
            return 1
        epoch = [each.joules * IMAGES / batch / 1e3 for each in (fp32, ours)]
        about = "about " if ours.energy_from == "estimate" else ""
        count = sum(p.numel() for p in make_model(width).parameters())
        table.add_row(
            f"{width}",
            f"{count / 1e6:.2f} M",
            *(f"{about}{each:.3g} kJ" for each in epoch),
            f"{epoch[1] / epoch[0]:.2f}",
            f"{ours.moved / fp32.moved:.2f}",
        )
        pays = bench.evidence is None or bench.evidence.pays
        held = held and (epoch[1] < epoch[0] or not (about or pays))
    console.print(table)
    console.print(f"\nEnergy: {bench.energy_how}.")
    said = "yes" if held else "NO"
    console.print(f"Less energy in mixed precision at each width: {said}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
