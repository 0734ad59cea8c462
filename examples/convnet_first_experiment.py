"""A convolutional network that gained almost nothing from mixed precision, and why.

The network of "First experiments with TensorFlow mixed-precision training" (2020) was
trained in fp32 and in mixed precision on a V100; its steps became 7 % to 9 % shorter,
and the author could not say why so little.  This example predicts the same network at
the same batches for a V100, and puts the published times beside the prediction.  No
weights and no images are needed: the network is on torch's "meta" device.

    python examples/convnet_first_experiment.py
    python examples/convnet_first_experiment.py --batches 32 64

The published times tell the speed at which the V100 computed.  Where that speed in
mixed precision is below the peak of fp32, tensor cores cannot have done the work.

The exit status is 1 unless the convolution of 11 x 11 has most of the arithmetic, the
report says so, and the published speeds in mixed precision are below the fp32 peak.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autoamp

V100 = "cuda:sm_70"
SIDE, CLASSES = 256, 10

PUBLISHED = {
    32: (28, 30),
    64: (52, 56),
    128: (97, 106),
    256: (188, 206),
    512: (377, 415),
}
"""Batch to the published milliseconds a step on a V100 16 GB: mixed, fp32."""


def make_model() -> nn.Sequential:
    """The published layers; the softmax is part of the loss."""
    layers: list[nn.Module] = []
    channels = 3
    for width, kernel in ((32, 5), (64, 7), (128, 11)):
        layers += [
            nn.Conv2d(channels, width, kernel, stride=2, padding=kernel // 2),
            nn.ReLU(),
            nn.BatchNorm2d(width),
        ]
        channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
    return nn.Sequential(*layers, *head)


def flops_a_sample() -> tuple[int, float]:
    """Flops of a forward and a backward, and the part of the convolution of 11 x 11.

    The counter of torch counts what runs, so the first convolution has no gradient of
    its input.
    """
    with torch.device("meta"):
        model, images = make_model(), torch.empty(1, 3, SIDE, SIDE)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    by_module = counter.get_flop_counts()
    last = sum(by_module[f"{type(model).__name__}.6"].values())
    return counter.get_total_flops(), last / counter.get_total_flops()


def explained(batch: int) -> autoamp.Report:
    """The prediction for a V100 at one batch."""
    with torch.device("meta"):
        model, images = make_model(), torch.empty(batch, 3, SIDE, SIDE)
    return autoamp.explain(model, images, device=V100)


def shown(reports: dict[int, autoamp.Report], flops: int) -> Table:
    """The published times and speeds beside the predicted ones."""
    table = Table(title="Milliseconds of a step, mixed precision / fp32", box=None)
    for name in ("batch", "published", "speed-up", "TFLOP/s", "predicted", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for batch, report in reports.items():
        mixed, fp32 = PUBLISHED[batch]
        found = report.headline
        table.add_row(
            str(batch),
            f"{mixed} / {fp32}",
            f"{fp32 / mixed:.2f}",
            f"{speed(batch, mixed, flops):.1f} / {speed(batch, fp32, flops):.1f}",
            f"{1e3 * (found.seconds or 0):.1f} / {1e3 * (found.seconds_fp32 or 0):.0f}",
            f"{found.speed_up:.2f}",
        )
    return table


def speed(batch: int, milliseconds: float, flops: int) -> float:
    """TFLOP/s of a step."""
    return batch * flops / milliseconds / 1e9


def reasons(reports: dict[int, autoamp.Report], flops: int) -> Sequence[str]:
    """The steps of the reasoning, each with its figures."""
    batch, report = max(reports.items())
    times, device = report.prediction, report.sections[0].device
    assert times is not None
    mixed, fp32 = PUBLISHED[batch]
    memory = times.shares(placed=False)["memory"] * times.seconds(placed=False)
    halved = 1e3 * memory / 2
    peak, low_peak = (
        each / 1e3 for each in (device.high_flops_per_ns, device.low_flops_per_ns)
    )
    reached = speed(batch, mixed, flops)
    speeds = (
        f"A sample takes {flops / 1e9:.1f} GFLOP, forward and backward. At batch "
        f"{batch} the published step in mixed precision thus ran at {reached:.1f} "
        f"TFLOP/s. That is {reached / peak:.0%} of the V100's peak in fp32 "
        f"({peak:.1f}) and {reached / low_peak:.0%} of the peak of its tensor cores "
        f"({low_peak:.0f})."
    )
    finding = (
        "So the published convolutions did not use the tensor cores to any effect, "
        f"although the policy was mixed precision. The step became {fp32 - mixed} ms "
        f"shorter; by prediction smaller values in memory alone save {halved:.0f} ms."
    )
    change = (
        "Two changes can bring tensor cores in. Their kernels want the channels last, "
        "which autoamp sees to. And they work fastest on sizes that are multiples of "
        f"8, which the three channels of the images and the {CLASSES} classes are not. "
        "Five channels of zeros beside the three are the cheapest padding."
    )
    return speeds, finding, change


def main(argv: list[str] | None = None) -> int:
    """Predicts each batch, prints the reasoning, returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--batches", type=int, nargs="+", choices=PUBLISHED, default=list(PUBLISHED)
    )
    given = parser.parse_args(argv)

    console = Console(width=80)
    flops, share = flops_a_sample()
    reports = {batch: explained(batch) for batch in given.batches}
    batch, report = max(reports.items())
    console.print(shown(reports, flops))
    console.print(f"\nThe report on batch {batch}:\n{report.because}")
    for reason in reasons(reports, flops):
        console.print(f"\n{reason}")

    times = report.prediction
    assert times is not None
    peak = report.sections[0].device.high_flops_per_ns / 1e3
    named = "the convolution of 11 x 11 in module 6: " in report.because
    checks = {
        "the convolution of 11 x 11 has most of the arithmetic": share > 0.5,
        "the report names it": named,
        "every published speed is below the fp32 peak": all(
            speed(batch, mixed, flops) < peak for batch, (mixed, _) in PUBLISHED.items()
        ),
        "every predicted speed-up is above the published one": all(
            (each.headline.speed_up or 0) > PUBLISHED[batch][1] / PUBLISHED[batch][0]
            for batch, each in reports.items()
        ),
    }
    console.print()
    for what, held in checks.items():
        console.print(f"{'yes' if held else 'NO':<4}{what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
