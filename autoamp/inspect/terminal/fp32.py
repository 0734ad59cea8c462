"""The ops that stayed in fp32, grouped by reason, the most important first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from autoamp.inspect.costs import bytes_text
from autoamp.inspect.rows import OpRow
from autoamp.inspect.text import counted, one_name, op_title, shorten

MOST_REASONS = 10
MOST_PLACES = 3


def stayed_fp32(ops: Sequence[OpRow], low: str) -> Iterator[RenderableType]:
    """Yields a heading, then each reason and its ops with module and source line."""
    high = [row for row in ops if not row.is_low]
    if not high:
        yield Text(f"\nNothing stayed in fp32: every float op runs in {low}.", "bold")
        return
    yield Text(f"\nWhat stayed in fp32, and why ({counted(len(high), 'op')})", "bold")
    groups = by_importance(high)
    for reason, rows in groups[:MOST_REASONS]:
        yield Padding(Text(f"• {reason} ({counted(len(rows), 'op')})"), (0, 0, 0, 2))
        places = _places(rows)
        for place, source in places[:MOST_PLACES]:
            yield Padding(Text(place), (0, 0, 0, 6))
            if source:
                yield Padding(Text(source, "dim"), (0, 0, 0, 8))
        if len(places) > MOST_PLACES:
            more = f"... and {counted(len(places) - MOST_PLACES, 'more place')}"
            yield Padding(Text(more, "dim"), (0, 0, 0, 6))
    if len(groups) > MOST_REASONS:
        rest = groups[MOST_REASONS:]
        left = counted(sum(len(rows) for _, rows in rest), "op")
        yield Padding(
            Text(
                f"... and {counted(len(rest), 'more reason')} for {left}; "
                "all are in report.ops"
            ),
            (0, 0, 0, 2),
        )


def by_importance(high: Sequence[OpRow]) -> list[tuple[str, list[OpRow]]]:
    """(reason, ops) pairs: allow ops first, then by bytes read and written."""
    groups: dict[tuple[bool, str], list[OpRow]] = defaultdict(list)
    for row in high:
        groups[row.category != "allow", row.heading].append(row)
    ordered = sorted(
        groups.items(),
        key=lambda item: (item[0][0], -sum(row.bytes for row in item[1])),
    )
    return [
        (reason, sorted(rows, key=lambda row: -row.bytes))
        for (_, reason), rows in ordered
    ]


def _places(rows: Sequence[OpRow]) -> list[tuple[str, str]]:
    """(text, source line) for each op and line; repeats of a layer are one entry."""
    same: dict[tuple[str, str, str], list[OpRow]] = defaultdict(list)
    for row in rows:
        same[row.op, row.category, row.source].append(row)
    return [_place(repeats) for repeats in same.values()]


def _place(rows: Sequence[OpRow]) -> tuple[str, str]:
    first = rows[0]
    times = f" x{len(rows)}" if len(rows) > 1 else ""
    module = one_name([row.module for row in rows])
    moved = sum(row.bytes for row in rows)
    size = f", {bytes_text(moved)}" if moved else ", a view"
    where = f" in {module}" if module else ""
    what = f"{first.category} {op_title(first.op)}{times}{size}{where}"
    return what, shorten(first.source)
