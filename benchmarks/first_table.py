"""`python -m benchmarks.first_table`: the README's table, out of a committed table.

Nothing is measured here: times and memory are those of the H100 in fp16 and in bf16,
each as a share of autocast's in the same precision.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from .first_chart import BF16, FP16, LEFT_OUT, TITLES, rows_of
from .report import markdown
from .step_times import BASELINE, shares

HEADER = (
    "H100, autocast = 1",
    "fp16, the default",
    "bf16",
    "`.half()`",
    "`.bfloat16()`",
    "memory, bf16",
    "memory, `.bfloat16()`",
)


def rows() -> list[list[str]]:
    """The lines of the table, and the geometric means of the models but one."""
    every: dict[str, list[float]] = {}
    for half, row in zip(rows_of(FP16), rows_of(BF16), strict=True):
        fp16, bf16, ways = shares(half), shares(row), row["ways"]
        memory = {way: _memory(ways[way]) / _memory(ways[BASELINE]) for way in ways}
        figures = [fp16["autoamp"], bf16["autoamp"], fp16["float16"], bf16["bfloat16"]]
        every[row["name"]] = [*figures, memory["autoamp"], memory["bfloat16"]]
    lines = [[TITLES[name], *map(_cell, each)] for name, each in every.items()]
    fair = zip(*(each for name, each in every.items() if name != LEFT_OUT), strict=True)
    means = [statistics.geometric_mean(column) for column in fair]
    return [*lines, [f"mean without {TITLES[LEFT_OUT]}", *map(_cell, means)]]


def _memory(way: Mapping[str, Any]) -> float:
    """Weights and copies, and the most that a step allocates beside them."""
    return float(way["held"] + way["peak"])


def _cell(figure: float) -> str:
    return f"{figure:.2f}"


def main() -> int:
    """Prints the table."""
    print(markdown(HEADER, rows()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
