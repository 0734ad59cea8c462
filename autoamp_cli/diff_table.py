"""Shows a `Diff` in a terminal: one line of sums, then a table for each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autoamp.messages import counted, printable_line
from autoamp.passes.report_rows import CastRow, OpRow
from autoamp.passes.saved_reports import Change, Diff

_Rows = tuple[str, Sequence[Any], Sequence[str], Callable[[Any], Sequence[str]]]
"""The title of a table, its entries, its columns, and the cells of an entry."""

MOST = 20
"""The rows of each table, unless all are asked for."""


def table_of(found: Diff, *, full: bool = False) -> Iterator[RenderableType]:
    """The parts to print, one after the other.

    Args:
        full: show every row, not the first `MOST` of each table.
    """
    yield _line(f"{found.old} → {found.new}", "bold")
    if found.models[0] != found.models[1]:
        yield _line("The models are {} and {}.".format(*found.models), "red")
    if found.compute_dtypes[0] != found.compute_dtypes[1]:
        old, new = (each or "none" for each in found.compute_dtypes)
        yield _line(f"The compute dtype was {old} and is {new}.")
    yield _sums(found)
    rows: tuple[_Rows, ...] = (
        ("Ops that changed precision", found.changed, _CHANGE, _change),
        ("Ops that appeared", found.appeared, _OP, _op),
        ("Ops that vanished", found.vanished, _OP, _op),
        ("Casts added", found.casts_added, _CAST, _cast),
        ("Casts removed", found.casts_removed, _CAST, _cast),
    )
    for title, entries, columns, cells in rows:
        if entries:
            yield from _table(title, entries, columns, cells, full=full)
    for word, keys in (
        ("appeared", found.graphs_appeared),
        ("vanished", found.graphs_vanished),
    ):
        if keys:
            yield _line(f"Graphs that {word}: {', '.join(keys)}")


def _sums(found: Diff) -> Text:
    if found.is_empty:
        return _line(f"No difference in {counted(found.same, 'op')}.", "green")
    changed, every = len(found.changed), len(found.changed) + found.same
    added, removed = len(found.casts_added), len(found.casts_removed)
    return _line(
        f"{counted(changed, 'op')} of {every:,} changed precision; "
        f"{len(found.appeared):,} appeared, {len(found.vanished):,} vanished; "
        f"casts: {added:,} added, {removed:,} removed",
        "red" if changed else "",
    )


def _table(
    title: str,
    entries: Sequence[Any],
    columns: Sequence[str],
    cells: Callable[[Any], Sequence[str]],
    *,
    full: bool,
) -> Iterator[RenderableType]:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for entry in entries if full else entries[:MOST]:
        table.add_row(*(Text(printable_line(cell, 300)) for cell in cells(entry)))
    yield Text()
    yield table
    more = 0 if full else len(entries) - MOST
    if more > 0:
        yield _line(f"and {more:,} more; --full shows all")


_CHANGE = ("graph", "op", "module", "precision", "why", "source")
_OP = ("graph", "op", "module", "precision", "source")
_CAST = ("graph", "value", "kind", "to", "bytes")


def _change(change: Change) -> tuple[str, ...]:
    old, new = change.old, change.new
    name = new.name if old.name == new.name else f"{old.name} → {new.name}"
    precision = f"{old.precision} → {new.precision}"
    return _key(new), name, new.module, precision, new.reason, new.source


def _op(op: OpRow) -> tuple[str, ...]:
    return _key(op), op.name, op.module, op.precision, op.source


def _cast(cast: CastRow) -> tuple[str, ...]:
    return _key(cast), cast.value, cast.kind, cast.dtype, f"{cast.bytes:,}"


def _key(of: OpRow | CastRow) -> str:
    return f"{of.graph}/{of.body}" if of.body else str(of.graph)


def _line(text: str, style: str = "") -> Text:
    return Text(printable_line(text, 1000), style)
