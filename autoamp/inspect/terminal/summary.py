"""The report in one screen: four questions and their answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoamp.inspect.costs import bytes_text, seconds_text
from autoamp.inspect.sections.gains import (
    FOOTNOTE,
    WAYS,
    gains_of,
    runs_low_sentence,
)
from autoamp.inspect.sections.headline import Headline, Stayed
from autoamp.inspect.text import brief, counted, shorten
from autoamp.place.frontier import Frontier

LISTED = 3
"""Entries of each list; the rest are counted."""

LINE = 78
"""Columns of a line after its indentation, on a terminal of 80 columns."""


def runs_low(
    found: Headline, low: str, facts: Sequence[str]
) -> Iterator[Text | Padding]:
    """The ops that run low.

    Args:
        low: the short name of the compute dtype.
        facts: sentences on casts, kernels and calls.
    """
    yield _question("What runs low")
    yield _line(runs_low_sentence(found, low))
    yield from map(_line, facts)


def gains(found: Headline, low: str) -> Iterator[RenderableType]:
    """The predicted gains, beside fp32 and `torch.autocast`.

    Args:
        low: the short name of the compute dtype.
    """
    told = gains_of(found, low)
    yield _question(told.title)
    if told.rows:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for column in ("", *WAYS):
            justify: JustifyMethod = "right" if column else "left"
            table.add_column(column, justify=justify, no_wrap=True)
        for row in told.rows:
            table.add_row(*row)
        yield Padding(table, (0, 0, 0, 2))
    yield _line(told.sentence)
    if told.rows:
        yield _line(FOOTNOTE)


def budget(found: Frontier) -> Iterator[Text | Padding]:
    """The budget for error, and what came of it."""
    yield _question("Within the budget for error")
    yield from map(_line, found.sentences())


def stayed(
    found: Headline, groups: Sequence[Stayed], left: Sequence[tuple[str, str]]
) -> Iterator[Text | Padding]:
    """The ops that stayed in fp32, by reason, the costliest first.

    Args:
        left: the parts that were not captured, with the reasons.
    """
    count = sum(group.count for group in groups)
    if not count and not left:
        yield _question("What stayed in fp32, and why")
        yield _line("Nothing.")
        return
    size = ""
    if found.seconds is not None and count:
        spent = sum(group.seconds or 0 for group in groups)
        size = f", {seconds_text(spent)} of the {seconds_text(found.seconds)}"
    yield _question(f"What stayed in fp32, and why ({counted(count, 'op')}{size})")
    for group in groups[:LISTED]:
        yield _line(_group(group))
    more = len(groups) - LISTED
    if more > 0:
        yield _line(f"and {counted(more, 'more reason')}: report.full()")
    if left:
        (what, why), parts = left[0], counted(len(left), "part")
        them = "was" if len(left) == 1 else "were"
        where = f"{parts} {them} not captured: {shorten(what)}: "
        yield _line(where + brief(why, max(LINE - len(where), 24)))


def _group(group: Stayed) -> str:
    names = ", ".join(group.ops[:2]) + (", ..." if len(group.ops) > 2 else "")
    cost = bytes_text(group.bytes)
    if group.seconds is not None:
        cost = seconds_text(group.seconds)
    start = f"{cost:>7}  {names} ({group.count:,}): "
    return start + brief(group.reason, LINE - len(start))


def not_converted(
    why: Sequence[tuple[str, str]], facts: Sequence[str]
) -> Iterator[Text | Padding]:
    """The first three answers for a model that is not converted.

    Args:
        facts: sentences on the calls.
    """
    yield _question("What runs low")
    yield _line("Nothing: the model is not converted and runs unchanged.")
    yield from map(_line, facts)
    yield _question("What it should gain here")
    yield _line("Nothing.")
    yield _question("What was not converted, and why")
    for what, reason in why[:LISTED]:
        yield _line(f"{shorten(what)}: {reason.rstrip('.')}.")
    if len(why) > LISTED:
        yield _line(f"and {len(why) - LISTED:,} more: report.full()")


def what_next(advice: Sequence[str]) -> Iterator[Text | Padding]:
    """The advice."""
    yield _question("What to do next")
    yield from map(_line, advice)


def _question(text: str) -> Text:
    return Text(text, "bold")


def _line(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2))
