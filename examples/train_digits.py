"""Train a small network on real images in fp32 and in bf16, and compare the two.

The images are scikit-learn's handwritten digits (1,797 scans of 8 by 8 pixels), so
nothing is downloaded.  Both networks start from the same weights and see the same
batches in the same order; the only difference is one line, `autoamp.convert`.

Run `make demo`, or `python examples/train_digits.py --help`.  The exit status is 1 if
the two test accuracies differ by more than two points, or if no graph was rewritten.
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
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import autoamp

MAX_DIFFERENCE = 2.0
"""Percentage points of test accuracy that the two runs may differ by."""


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
        f"{machine}; no bf16 units found. bf16 is emulated here and slower than fp32; "
        "left to itself autoamp would not convert this model. This demo forces it "
        "(do_no_harm=False) to show what is changed and that the result holds."
    )


def excerpt(graph: str, lines: int) -> str:
    """The first operations of a graph's readable text, without its bookkeeping."""
    found = []
    for line in graph.splitlines():
        name, is_assignment, value = line.strip().partition(" = ")
        if is_assignment and not name.startswith("#") and "(" in value:
            found.append(f"{name} = {value.partition(';')[0]}")
    more = [f"# ... and {len(found) - lines} more"] if len(found) > lines else []
    return "\n".join(found[:lines] + more)


def results_table(rows: list[tuple[str, float, float]]) -> Table:
    """One row per run: name, test accuracy, milliseconds a step."""
    table = Table(title="Same weights, same batches, one line of difference")
    table.add_column("run")
    table.add_column("test accuracy", justify="right")
    table.add_column("median step", justify="right")
    for name, percent, step_ms in rows:
        table.add_row(name, f"{percent:.2f} %", f"{step_ms:.2f} ms")
    return table


def show_report(console: Console, report: autoamp.Report, lines: int) -> None:
    """The table of ops and casts, and the start of the graph before and after."""
    print(report)
    graph = report.graphs[0]
    before = report.rewritten[0].before.print_readable(print_output=False)
    after = graph.print_readable(print_output=False)
    for title, text in (("before", before), ("after", after)):
        code = Syntax(excerpt(text, lines), "python", word_wrap=True)
        console.print(Panel(code, title=f"the graph {title}"))


def main(argv: list[str] | None = None) -> int:
    """Trains twice, prints the comparison, returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=8, help="passes over the images")
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=12, help="lines shown of a graph")
    options = parser.parse_args(argv)

    console = Console()
    console.print(f"[bold]This machine:[/] {capability_line()}\n")
    train_x, train_y, test_x, test_y = load_images()

    runs, accuracies = [], []
    for name in ("fp32", "bf16"):
        model = make_model(options.seed)
        if name == "bf16":
            model = autoamp.convert(model, precision="bf16", do_no_harm=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        console.print(f"training in {name} ...")
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
    names = ["fp32", "bf16 (autoamp)"]
    console.print(results_table(list(zip(names, accuracies, steps, strict=True))))
    report = autoamp.report(runs[1][0])
    if not report.graphs:
        console.print("No graph was rewritten: both runs were fp32.")
        return 1
    show_report(console, report, options.lines)

    difference = abs(accuracies[0] - accuracies[1])
    verdict = "within" if difference <= MAX_DIFFERENCE else "MORE THAN"
    console.print(
        f"Accuracies differ by {difference:.2f} points, {verdict} {MAX_DIFFERENCE:g}; "
        f"a bf16 step takes {steps[1] / steps[0]:.2f} times an fp32 step here."
    )
    return 0 if difference <= MAX_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
