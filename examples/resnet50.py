"""ResNet-50: fp32, mixed precision, a compiler, and the batch that then fits.

TensorFlow's automatic mixed precision was shown in 2019 by four rows of ResNet-50 on a
V100: fp32, mixed precision, mixed precision with a compiler, and the same at twice the
batch.  This example measures these four rows here with `autoamp.bench`, and predicts
ResNet-50 on a V100 beside the published images a second.

    python examples/resnet50.py           # a short ResNet of small images
    python examples/resnet50.py --full    # ResNet-50 at 224 x 224, batch 128 and 256

fp16 on a GPU, bf16 on a CPU.  The exit status is 1 unless all flops of the converted
model run low, the backward keeps fewer bytes, and no published speed is above what the
prediction, which no real kernel reaches, allows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autoamp

PUBLISHED = {"fp32": 365, "AMP": 780, "AMP, compiler": 1010, "AMP, compiler, x2": 1205}
"""Images a second on a V100 16 GB at batch 128, and 256 in the last row."""


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out),
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(blocks: Sequence[int] = (3, 4, 6, 3)) -> nn.Sequential:
    """A ResNet of bottlenecks; by default ResNet-50."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = 64
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(channels, 64 << stage, stride))
            channels = 4 * (64 << stage)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers, *head)


def measured(
    blocks: Sequence[int], side: int, batch: int, rounds: int
) -> autoamp.Bench:
    """The ways at one batch, compiled too."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    low = "fp16" if device == "cuda" else "bf16"
    torch.manual_seed(0)
    return autoamp.bench(
        resnet(blocks).to(device),
        torch.randn(batch, 3, side, side, device=device),
        precision=low,
        do_no_harm=False,
        ways=["autoamp"],
        compiled=True,
        rounds=rounds,
        steps=2,
    )


def four_rows(bench: autoamp.Bench, twice: autoamp.Bench) -> Table:
    """The four rows: images a second beside fp32's, bytes kept and at the peak."""
    fp32 = bench.row("fp32")
    rows = {
        "fp32": fp32,
        "AMP": bench.row("autoamp"),
        "AMP, compiler": bench.row("autoamp, compiled"),
        "AMP, compiler, x2": twice.row("autoamp, compiled"),
    }
    table = Table(box=None, title=f"Measured: {bench.precision} on {bench.device}")
    for name in ("", "batch", "images/s of fp32's", "kept", "peak"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, row in rows.items():
        speed = f"{row.samples / fp32.samples:.2f}" if row.samples else row.error[:20]
        sizes = (f"{b / 1e6:.0f} MB" if b else "-" for b in (row.saved, row.peak))
        table.add_row(name, str(row.batch), speed, *sizes)
    return table


def predicted(batch: int) -> tuple[float, float, float]:
    """Images a second on a V100: fp32, AMP, and AMP if products alone took time."""
    with torch.device("meta"):
        model, images = resnet(), torch.empty(batch, 3, 224, 224)
    report = autoamp.explain(model, images, device="cuda:sm_70")
    found = report.prediction
    assert found is not None
    products = sum(op.placed.nanoseconds for op in found.ops if op.row.flops) * 1e-9
    times = (found.seconds(placed=False), found.seconds(placed=True), products)
    high, low, ceiling = (batch / each for each in times)
    return high, low, ceiling


def beside_published() -> tuple[Table, bool]:
    """The published images a second beside the predicted, and whether all are below."""
    (high, low, ceiling), (_, _, twice) = predicted(128), predicted(256)
    table = Table(box=None, title="ResNet-50 on a V100, images a second")
    for name in ("", "published", "of fp32's", "predicted, at most"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    right = True
    for (name, speed), most in zip(
        PUBLISHED.items(), (high, low, ceiling, twice), strict=True
    ):
        ratio = speed / PUBLISHED["fp32"]
        table.add_row(name, str(speed), f"{ratio:.2f}", f"{most:.0f}")
        right = right and speed < most
    return table, right


def main(argv: list[str] | None = None) -> int:
    """Measures, predicts, checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--full", action="store_true", help="the published sizes")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each way")
    given = parser.parse_args(argv)
    sizes = ((3, 4, 6, 3), 224, 128) if given.full else ((1, 1), 64, 8)
    blocks, side, batch = sizes

    console = Console(width=80)
    table, below = beside_published()
    console.print(table)
    console.print("A compiler is predicted as if products alone took time.\n")
    bench, twice = (
        measured(blocks, side, size, given.rounds) for size in (batch, 2 * batch)
    )
    console.print(four_rows(bench, twice))
    console.print(f"\n{bench.answer.sentence}\n")
    fp32, ours = (bench.row(way) for way in ("fp32", "autoamp"))
    checks = {
        "every way ran": not any(row.error for row in bench.rows + twice.rows),
        "all flops of products run low": ours.low_flops == ours.flops,
        "the backward keeps fewer bytes": (ours.saved or 0) < (fp32.saved or 0),
        "no published speed is above the predicted one": below,
    }
    for what, held in checks.items():
        console.print(f"{'yes' if held else 'NO':<4}{what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
