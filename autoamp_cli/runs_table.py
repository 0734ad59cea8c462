"""Shows a comparison of two runs in a terminal: sentences, then a table of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autoamp.printable import printable_line
from autoamp.runs.comparison import Comparison, Pair, Row

_FACTS = {
    "batch": "Other data: the batches differ from step {} on.",
    "calls": "Another number of calls of the model in a step, first at step {}.",
    "losses": "Another number of backwards in a step, first at step {}.",
    "rng": "Other random numbers: the generators differ from step {} on.",
    "taken": "Other skipped steps: step {} is skipped in one run alone.",
    "scale": "Another loss scale, first at step {}.",
    "optimizer": "Another optimizer, first at step {}.",
}
_REASONS = {
    "data": "the batches differ, so the numbers cannot agree",
    "calls": "the runs do not make the same calls in it",
    "skipped": "one run alone skips it",
}


def table_of(found: Comparison) -> Iterator[RenderableType]:
    """The parts to print, one after the other."""
    for mark, path, precision in zip("AB", found.paths, found.precisions, strict=True):
        yield _line(f"{mark}: {path} ({found.label}, {precision})", "bold")
    yield _line(_verdict(found), "red" if found.status else "green")
    for pair in found.beyond:
        yield _line(f"  {_pair(pair)}")
    if found.op is not None:
        yield _line(f"The first op that parts there: {_pair(found.op)}.")
    for name, text in _FACTS.items():
        if name in found.firsts:
            yield _line(text.format(found.firsts[name]))
    yield from _more(found)
    yield Text()
    yield _table(found)


def _verdict(found: Comparison) -> str:
    first, last = found.steps
    where = f" of rank {found.rank}" if len(found.ranks) > 1 or found.rank else ""
    if found.parted is None:
        same = "within rounding" if found.tolerance is None else "within the tolerance"
        same = same if found.unequal is not None else "to the bit"
        return f"Steps {first} to {last}{where} agree {same}."
    law = "rounding" if found.tolerance is None else "the tolerance"
    why = _REASONS.get(found.why, f"the difference is beyond {law}")
    if found.start and found.parted == 1:
        random = found.firsts.get("rng") == found.parted
        other = "other random numbers, or " if random else ""
        why = f"the first, with the same data: {other}other weights at the start"
    elif found.start:
        why += "; it is the first step that both rings have"
    return f"The runs part at step {found.parted}{where}: {why}."


def _more(found: Comparison) -> Iterator[Text]:
    if found.unequal is not None and found.unequal != found.parted:
        yield _line(f"Step {found.unequal} is the first with any difference at all.")
    if found.blind is not None and found.parted is None:
        yield _line(
            f"At step {found.blind} rounding may have changed any number by its own "
            "size; --tolerance compares more strictly."
        )
    for name, (one, other) in found.changed.items():
        yield _line(f"{name}: {one} in A, {other} in B")
    for note in found.notes:
        yield _line(note)


def _table(found: Comparison) -> Table:
    table = Table(box=None)
    allowed = "rounding" if found.tolerance is None else "tolerance"
    for name in ("step", "loss A", "loss B", "apart", allowed):
        table.add_column(name, justify="right")
    for name in ("gradient", "result"):
        table.add_column(f"{name} apart", justify="right")
    table.add_column("other")
    for row in found.around:
        style = "red" if row.step == found.parted else ""
        table.add_row(*map(Text, _cells(row)), style=style)
    return table


def _cells(row: Row) -> Iterator[str]:
    pairs = {pair.name: pair for pair in row.pairs}
    yield str(row.step)
    loss = pairs.get("loss")
    if loss is None:
        yield from ("", "", "", "")
    else:
        yield from (_number(loss.a), _number(loss.b))
        yield from (f"{loss.apart:.1e}", f"{loss.allowed:.1e}")
    for name in ("gradient", "result"):
        pair = pairs.get(name)
        mark = "!" if pair and pair.parts else ""
        yield f"{pair.apart:.1e}{mark}" if pair else ""
    yield ", ".join(row.other)


def _pair(pair: Pair) -> str:
    return (
        f"{pair.name}: {_number(pair.a)} in A, {_number(pair.b)} in B, "
        f"{pair.apart:.1e} apart; allowed is at most {pair.allowed:.1e}"
    )


def _number(value: Any) -> str:
    return f"{value:.6g}"


def _line(text: str, style: str = "") -> Text:
    return Text(printable_line(text, 1000), style)
