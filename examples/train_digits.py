"""Train a small network on real images in fp32, under autocast and with autoamp.

The images are scikit-learn's handwritten digits (1,797 scans of 8 by 8 pixels), so
nothing is downloaded.  All networks start from the same weights and see the same
batches in the same order; autoamp's differs by one line, `autoamp.convert`.

Run `make demo`, or `python examples/train_digits.py --help`.  The exit status is 1 if
the test accuracies of fp32 and autoamp differ by more than two points, or if no graph
was rewritten.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autoamp

MAX_DIFFERENCE = 2.0
"""Percentage points of test accuracy that fp32 and autoamp may differ by."""

WAYS = ("fp32", "autocast", "autoamp")

NEXT = """[bold]Where to look next[/]
  print(autoamp.report(model))       what runs low, and why the rest does not
  autoamp bench pkg.module:factory   would it pay for your model, here?
  autoamp run train.py               your own script, without changing a line
  autoamp.explain(model, x, device="cuda:sm_80").because
                                     what a GPU would gain, and why
  docs/quick-start.md                the first steps"""


# -- an ordinary model and an ordinary training loop ----------------------------------


def make_model(seed: int) -> nn.Module:
    """A convolutional network for 8 by 8 images, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.GELU(),
        nn.Linear(128, 10),
    )


def load_images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images, train labels, test images, test labels."""
    from sklearn.datasets import load_digits  # takes a second
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        torch.arange(len(labels)).numpy(),
        test_size=0.25,
        random_state=0,
        stratify=labels.numpy(),
    )
    return images[train], labels[train], images[test], labels[test]


def batches(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, ...]]:
    """The training set once, in random order, in whole batches."""
    order = torch.randperm(len(labels))
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield images[chosen], labels[chosen]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    """One step; nothing in it knows about precision."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    batch: int,
    seed: int,
) -> None:
    """`epochs` passes over the images, in an order fixed by `seed`."""
    torch.manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for some_images, some_labels in batches(images, labels, batch):
            train_step(model, optimizer, some_images, some_labels)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent of the images that the model labels correctly."""
    model.eval()
    return 100 * (model(images).argmax(dim=1) == labels).double().mean().item()


# -- what is measured and shown -------------------------------------------------------


def median_ms(
    runs: list[tuple[nn.Module, torch.optim.Optimizer]],
    images: Tensor,
    labels: Tensor,
    *,
    rounds: int,
) -> list[float]:
    """Median time of a training step of each run, taken in turns: A B A B ..."""
    times: list[list[float]] = [[] for _ in runs]
    for model, _ in runs:
        model.train()
    for turn in range(rounds + 2):
        for (model, optimizer), record in zip(runs, times, strict=True):
            start = time.perf_counter()
            train_step(model, optimizer, images, labels)
            if turn >= 2:  # the first two turns warm up
                record.append(1000 * (time.perf_counter() - start))
    return [statistics.median(record) for record in times]


def bf16_units() -> list[str]:
    """Linux's names of this CPU's instructions that multiply bf16 numbers."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return sorted(words & {"amx_bf16", "avx512_bf16", "bf16"})


def capability_line() -> str:
    """What this CPU can do with bf16, and what that means for the run below."""
    machine = (
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    units = bf16_units()
    if units:
        return f"{machine}; bf16 units: {', '.join(units)}"
    return (
        f"{machine}; no bf16 units found. bf16 is emulated here and slower than fp32, "
        "so the times below say nothing of mixed precision. Left to itself autoamp "
        "would not convert this model; the demo forces it (do_no_harm=False)."
    )


def results_table(rows: list[tuple[str, float, float, int]]) -> Table:
    """One row per way: name, test accuracy, milliseconds a step, bytes kept."""
    table = Table(title="What was gained: same weights, same batches", box=None)
    for name in ("", "test accuracy", "median step", "of fp32's", "kept for backward"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    _, _, fp32_ms, _ = rows[0]
    for name, percent, step_ms, kept in rows:
        accurate, ratio = f"{percent:.2f} %", f"{step_ms / fp32_ms:.2f}"
        size = f"{kept / 1e6:.2f} MB"
        table.add_row(name, accurate, f"{step_ms:.2f} ms", ratio, size)
    return table


def kept_in_fp32(report: autoamp.Report) -> list[str]:
    """A line for each reason for which ops stayed in fp32."""
    said = [
        f"  {', '.join(group.ops)} ({group.count}): {group.reason}"
        for group in report.stayed
    ]
    return said or [f"  Nothing: all {len(report.ops)} float ops run in bf16."]


def kept_bytes(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Bytes that the forward keeps for the backward, the fp32 weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = nn.functional.cross_entropy(model(images), labels)
    sizes = [kept[key].untyped_storage().nbytes() for key in kept.keys() - weights]
    del loss
    return sum(sizes)


class UnderAutocast(nn.Module):
    """The same network under `torch.autocast`, to stand beside."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.network(images).float()


def made(way: str, seed: int) -> nn.Module:
    """The model as one of `WAYS` runs it."""
    model = make_model(seed)
    if way == "autocast":
        return UnderAutocast(model)
    if way == "autoamp":
        return autoamp.convert(model, precision="bf16", do_no_harm=False)
    return model


def main(argv: list[str] | None = None) -> int:
    """Trains three times, prints the comparison, returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the images")
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    console = Console(highlight=False)
    console.print(f"[bold]This machine:[/] {capability_line()}\n")
    train_x, train_y, test_x, test_y = load_images()

    runs, accuracies = [], []
    for way in WAYS:
        model = made(way, options.seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(
            model,
            optimizer,
            train_x,
            train_y,
            epochs=options.epochs,
            batch=options.batch,
            seed=options.seed,
        )
        runs.append((model, optimizer))
        accuracies.append(accuracy(model, test_x, test_y))

    images, labels = train_x[: options.batch], train_y[: options.batch]
    steps = median_ms(runs, images, labels, rounds=options.rounds)
    kept = [kept_bytes(model, images, labels) for model, _ in runs]
    console.print(results_table(list(zip(WAYS, accuracies, steps, kept, strict=True))))
    report = autoamp.report(runs[2][0])
    if not report.graphs:
        console.print("No graph was rewritten: all runs were fp32.")
        return 1
    console.print("\n[bold]What was kept in fp32, and why[/]")
    for line in kept_in_fp32(report):
        console.print(line)
    return verdict(console, accuracies[0], accuracies[2])


def verdict(console: Console, fp32: float, ours: float) -> int:
    """Says whether the accuracies agree, and where to look next; the exit status."""
    difference = abs(fp32 - ours)
    said = "within" if difference <= MAX_DIFFERENCE else "MORE THAN"
    console.print(
        f"\nAccuracies of fp32 and autoamp differ by {difference:.2f} points, {said} "
        f"{MAX_DIFFERENCE:g}.\n"
    )
    console.print(NEXT)
    return 0 if difference <= MAX_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
