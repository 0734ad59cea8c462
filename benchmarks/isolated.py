"""`python -m benchmarks.isolated`: one product between fp32 ops on a CPU, three ways.

In fp32; in bf16 between casts; and in fp32 with torch's switch by which oneDNN may
round the operands to bf16 inside and writes its fp32 sums.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import report
from .report import Data
from .timing import interleaved, keep_freed_memory, ratios, repeated

SIZES = ((32, 768, 768), (256, 768, 768), (512, 768, 3072), (2048, 1024, 1024))
"""Rows, inputs and outputs."""

FP32, CASTS, SWITCH = "fp32", "casts", "switch"
ROUNDS = 31
LOW = torch.bfloat16
HEADER = (
    "rows x inputs x outputs",
    "fp32, ms",
    "casts / fp32",
    "switch / fp32",
    "switch / casts",
    "error, casts",
    "error, switch",
)

NOTE = """\
`linear` of normal numbers without gradients: in fp32; with its operand cast down, a
weight that was cast before, and its result cast up ("casts"); and under
`torch.backends.mkldnn.matmul.fp32_precision = "bf16"` ("switch"), which allows oneDNN
to round operand and weight inside. Medians of interleaved rounds, and of their ratios.
Errors are norms against float64 over the norm of the result."""

FOLLOWS = """\
The switch is one setting for all products of the process, with no form for one call,
and the bf16 product between casts is faster. autoamp leaves the switch as it is."""

IN_FP32 = """\
The error of the switch is that of fp32: nothing was rounded to bf16 on this CPU. The
switch gave the product to another fp32 kernel, oneDNN's, and the ratio is that of the
two kernels."""
EXACT = 1e-5
"""An error below which no operand was rounded to bf16."""


@contextmanager
def rounding_inside() -> Iterator[None]:
    """Lets oneDNN round the operands of fp32 products to bf16; then puts it back."""
    switch = torch.backends.mkldnn.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before


def ways_of(x: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The product, (rows, inputs) by (outputs, inputs), in each way."""
    copy = weight.to(LOW)

    def switched() -> Tensor:
        with rounding_inside():
            return linear(x, weight)

    return {
        FP32: lambda: linear(x, weight),
        CASTS: lambda: linear(x.to(LOW), copy).float(),
        SWITCH: switched,
    }


def measured(rows: int, inputs: int, outputs: int, rounds: int) -> Data:
    """The figures of one size."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    ways = ways_of(x, weight)
    true = linear(x.double(), weight.double())
    errors = {
        name: ((way().double() - true).norm() / true.norm()).item()
        for name, way in ways.items()
    }

    taken = interleaved({n: partial(repeated, w, 3) for n, w in ways.items()}, rounds)
    return {
        "size": [rows, inputs, outputs],
        "fp32": median(taken[FP32]) / 3,
        "ratios": ratios(taken, FP32),
        "switch over casts": ratios(taken, CASTS)[SWITCH],
        "errors": errors,
    }


@torch.no_grad()
def measure(given: argparse.Namespace) -> Data:
    """The figures of all sizes, or of the smallest."""
    keep_freed_memory()
    sizes = SIZES[:1] if given.quick else SIZES
    return {"rows": [measured(*size, given.rounds) for size in sizes]}


def text(data: Data) -> str:
    """The page."""
    lines = [
        [
            " x ".join(map(str, row["size"])),
            f"{row['fp32'] * 1e3:.3f}",
            f"{row['ratios'][CASTS]:.2f}",
            f"{row['ratios'][SWITCH]:.2f}",
            f"{row['switch over casts']:.2f}",
            f"{row['errors'][CASTS]:.1e}",
            f"{row['errors'][SWITCH]:.1e}",
        ]
        for row in data["rows"]
    ]
    exact = all(row["errors"][SWITCH] < EXACT for row in data["rows"])
    told = [IN_FP32, FOLLOWS] if exact else [FOLLOWS]
    return report.page(data, NOTE, report.markdown(HEADER, lines), *told)


TABLE = report.Table(
    "isolated", measure, text, options=(report.rounds(ROUNDS), report.QUICK)
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
