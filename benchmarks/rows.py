"""`python -m benchmarks.rows`: products of few rows, bf16 against fp32, on this CPU.

What `passes/decide/cost.py` takes for products of a few rows on a CPU comes from here.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from rich.progress import track
from torch.nn import functional

from . import report
from .report import Data
from .timing import interleaved, ratios, repeated

ROWS = (1, 2, 3, 4, 8, 16, 32)
SHAPES = ((768, 3072), (3072, 768), (768, 768), (768, 50257))
REPEATS = 20
HEADER = ("rows", *(f"{inside} x {out}" for inside, out in SHAPES), "geometric mean")


def ratio(rows: int, inside: int, out: int, rounds: int) -> float:
    """Time of `linear` in bf16 over fp32, weights and data already in either."""
    high = torch.randn(rows, inside), torch.randn(out, inside), torch.randn(out)
    low = [each.bfloat16() for each in high]
    calls = {
        "fp32": partial(functional.linear, *high),
        "bf16": partial(functional.linear, *low),
    }
    steps = {way: partial(repeated, call, REPEATS) for way, call in calls.items()}
    with torch.inference_mode():
        interleaved(steps, 3)
        return ratios(interleaved(steps, rounds), "fp32")["bf16"]


def measure(given: argparse.Namespace) -> Data:
    """The ratios of every row count."""
    torch.manual_seed(0)
    found = {
        str(rows): [ratio(rows, *shape, given.rounds) for shape in SHAPES]
        for rows in track(ROWS, "linear", transient=True)
    }
    note = "time of a bf16 `linear` over fp32's, medians of interleaved rounds"
    return {"note": note, "ratios": found}


def text(data: Data) -> str:
    """The page."""
    lines = [
        [rows, *(f"{r:.2f}" for r in (*each, statistics.geometric_mean(each)))]
        for rows, each in data["ratios"].items()
    ]
    return report.page(data, report.markdown(HEADER, lines))


TABLE = report.Table(
    "rows", measure, text, options=(report.rounds(15),), stem=lambda _: "rows-cpu"
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
