"""`python -m benchmarks.rows`: products of few rows, bf16 against fp32, on this CPU.

What `place/cost.py` takes for products of a few rows on a CPU comes from here.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.progress import track
from torch.nn import functional

from . import report
from .capability import capability
from .timing import interleaved, ratios

ROWS = (1, 2, 3, 4, 8, 16, 32)
SHAPES = ((768, 3072), (3072, 768), (768, 768), (768, 50257))
REPEATS = 20
HEADER = ("rows", *(f"{inside} x {out}" for inside, out in SHAPES), "geometric mean")


def ratio(rows: int, inside: int, out: int, rounds: int) -> float:
    """Time of `linear` in bf16 over fp32, weights and data already in either."""
    x, w, b = torch.randn(rows, inside), torch.randn(out, inside), torch.randn(out)
    low = [each.bfloat16() for each in (x, w, b)]
    steps = {
        "fp32": partial(_repeated, x, w, b),
        "bf16": partial(_repeated, *low),
    }
    with torch.inference_mode():
        interleaved(steps, 3)
        return ratios(interleaved(steps, rounds), "fp32")["bf16"]


def _repeated(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> None:
    for _ in range(REPEATS):
        functional.linear(x, w, b)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every row count, prints the table and writes it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rows")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    lines: list[list[str]] = []
    found: dict[int, list[float]] = {}
    for rows in track(ROWS, "linear", transient=True):
        found[rows] = [ratio(rows, *shape, options.rounds) for shape in SHAPES]
        mean = statistics.geometric_mean(found[rows])
        lines.append([str(rows), *(f"{r:.2f}" for r in (*found[rows], mean))])
    line = capability("cpu")
    note = f"{line}; time of a bf16 `linear` over fp32's, medians of interleaved rounds"
    text = "\n".join([note, "", report.markdown(HEADER, lines)]) + "\n"
    report.write(options.out / "rows-cpu", text, {"capability": line, "ratios": found})
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
