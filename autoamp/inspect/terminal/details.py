"""Lists that follow the summary: predicted times, casts, weights, odd sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from autoamp.inspect.costs import bytes_text, seconds_text
from autoamp.inspect.rows import CastRow
from autoamp.inspect.sections.dimensions import MULTIPLE, Misfit
from autoamp.inspect.sections.headline import Headline
from autoamp.inspect.sections.prediction import Prediction
from autoamp.inspect.sections.weights import WeightRow
from autoamp.inspect.terminal.parts import plain_table
from autoamp.inspect.text import counted, one_name, op_title, shorten

LISTED = 3
"""Entries of each list; the rest are counted."""


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"


def prediction(found: Prediction, headline: Headline) -> Iterator[RenderableType]:
    """The predicted times by class of op, and the bound on the speed-up."""
    yield Text.assemble(
        ("\nPredicted time", "bold"),
        f" of ops and casts, forward and backward (figures of {found.device})",
    )
    table = plain_table("", numbers=("number", "in fp32", "as placed"))
    for each in found.classes:
        fp32 = seconds_text(each.fp32) if each.fp32 else "-"
        table.add_row(each.title, _count(each.ops), fp32, seconds_text(each.placed))
    table.add_row("together", "", seconds_text(found.fp32), seconds_text(found.placed))
    yield Padding(table, (0, 0, 0, 2))
    share, limit = found.share_that_may_be_low, found.limit
    bound = (
        f"; if these took no time: {limit:.1f} times as fast" if limit < 1000 else ""
    )
    yield _indented(
        f"{found.speed_up:.2f} times as fast as fp32. Of the fp32 time {share:.0%} is "
        f"in ops that may be low{bound}."
    )
    if headline.trains:
        yield _indented(
            f"Values kept for the backward: {bytes_text(headline.kept)} instead of "
            f"{bytes_text(headline.kept_fp32)}."
        )


def because(text: str) -> Padding:
    """The paragraph that explains the speed-up."""
    return _indented(text)


def largest_casts(casts: Sequence[CastRow]) -> Iterator[RenderableType]:
    """The casts made at every call, by source line, the largest first."""
    groups: dict[tuple[str, str], list[CastRow]] = {}
    for cast in casts:
        if cast.every_call:
            groups.setdefault((cast.kind, cast.source), []).append(cast)
    if not groups:
        return
    largest = sorted(groups.items(), key=lambda g: -sum(c.bytes for c in g[1]))
    total = sum(cast.bytes for each in groups.values() for cast in each)
    count = sum(len(each) for each in groups.values())
    title = (
        f"\nCasts in each forward ({count:,}, {bytes_text(total)}), the largest first"
    )
    yield Text(title, "bold")
    for (kind, source), each in largest[:LISTED]:
        size = bytes_text(sum(cast.bytes for cast in each))
        made = ", ".join(dict.fromkeys(op_title(cast.producer) for cast in each))
        where = f" at {shorten(source)}" if source else ""
        yield _line(f"• {len(each)} {kind}, {size}: {made}{where}")


def weights_out_of_range(rows: Sequence[WeightRow]) -> Iterator[RenderableType]:
    """The weights with numbers that the low dtype cannot hold."""
    bad = [row for row in rows if not row.fits]
    if not bad:
        return
    title = f"\nWeights out of the range of {bad[0].dtype} ({len(bad)} of {len(rows)})"
    yield Text(title, "bold")
    for row in bad[:LISTED]:
        assert row.range is not None
        said = f"{row.range.lost:,} of {row.range.count:,} numbers become 0"
        if row.range.too_large or not math.isfinite(row.range.largest):
            said = f"the largest magnitude is {row.range.largest:.3g}"
        yield _line(f"• {row.name}: {said}")
    if len(bad) > LISTED:
        yield _line(f"  and {counted(len(bad) - LISTED, 'more weight')}")


def odd_sizes(misfits: Sequence[Misfit]) -> Iterator[RenderableType]:
    """The sizes that miss the multiples of tensor cores, with their modules."""
    if not misfits:
        return
    yield Text(f"\nSizes of products that are no multiple of {MULTIPLE}", "bold")
    sizes: dict[tuple[int, int], list[Misfit]] = {}
    for each in misfits:
        sizes.setdefault((each.size, each.next), []).append(each)
    for (size, above), same in list(sizes.items())[:LISTED]:
        where = one_name([misfit.module or misfit.name for misfit in same])
        yield _line(f"• {size:,} in {where}: tensor cores prefer {above:,}")
    if len(sizes) > LISTED:
        yield _line(f"  and {counted(len(sizes) - LISTED, 'more size')}")


def _line(text: str) -> Padding:
    """One line, cut where it does not fit."""
    return Padding(Text(text, no_wrap=True, overflow="ellipsis"), (0, 0, 0, 2))


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2))
