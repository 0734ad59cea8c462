"""Pieces that the summary and the full report share, and text made of renderables."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

WIDTH = 80
"""Columns of the summary where no terminal says how wide it is."""

FULL_WIDTH = 100
"""Columns of lists with source lines."""


def plain_table(first: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    """A table without a frame; the columns `numbers` are set flush right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in (first, *columns):
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, no_wrap=True, justify="right")
    return table


def as_text(parts: Sequence[RenderableType], width: int = FULL_WIDTH) -> str:
    """The parts as plain text, `width` columns wide."""
    file = io.StringIO()
    console = _console(file, width, color_system=None)
    for part in parts:
        console.print(part)
    lines = (line.rstrip() for line in file.getvalue().splitlines())
    return "\n".join(lines).rstrip()


def recording() -> Console:
    """A console that prints nowhere, and from which HTML can be exported."""
    return _console(io.StringIO(), WIDTH, color_system="truecolor", record=True)


def _console(file: io.StringIO, width: int, **options: Any) -> Console:
    return Console(
        file=file,
        width=width,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        **options,
    )
