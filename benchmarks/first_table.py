"""`python -m benchmarks.first_table`: the README's table, out of a committed table.

Nothing is measured here: times and memory are those of the H100 in bf16, each as a
share of autocast's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .first_chart import TITLES, rows_of_the_table
from .report import markdown
from .step_times import BASELINE, shares, without_figure
from .ways import CHANNELS_LAST

LAST = f"{BASELINE}{CHANNELS_LAST}"
HEADER = (
    "H100, bf16, autocast = 1",
    "autoamp",
    "`.bfloat16()`",
    "autocast, channels last",
    "memory, autoamp",
    "memory, `.bfloat16()`",
)


LEFT_OUT = "resnet50"
"""The model whose time under autocast suffers most from images not channels last."""


def rows() -> list[list[str]]:
    """The lines of the table, and the geometric means."""
    every: dict[str, list[float | None]] = {}
    lines = []
    for row in rows_of_the_table():
        times, ways = shares(row), row["ways"]
        memory = {way: _memory(ways[way]) / _memory(ways[BASELINE]) for way in ways}
        figures = [times["autoamp"], times["bfloat16"], times.get(LAST)]
        figures += [memory["autoamp"], memory["bfloat16"]]
        every[row["name"]] = figures
        cells = [_cell(each, without_figure(row, LAST)) for each in figures]
        lines.append([TITLES[row["name"]], *cells])
    fair = [figures for name, figures in every.items() if name != LEFT_OUT]
    without = f"mean without {TITLES[LEFT_OUT]}"
    return [*lines, _means(without, fair), _means("mean", [*every.values()])]


def _means(title: str, every: Sequence[Sequence[float | None]]) -> list[str]:
    """A line of geometric means, empty where a figure is missing."""
    cells = []
    for column in zip(*every, strict=True):
        found = [each for each in column if each is not None]
        whole = len(found) == len(column)
        cells.append(f"{statistics.geometric_mean(found):.2f}" if whole else "")
    return [title, *cells]


def _memory(way: Mapping[str, Any]) -> float:
    """Weights and copies, and the most that a step allocates beside them."""
    return float(way["held"] + way["peak"])


def _cell(figure: float | None, without: str) -> str:
    return without if figure is None else f"{figure:.2f}"


def main() -> int:
    """Prints the table."""
    print(markdown(HEADER, rows()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
