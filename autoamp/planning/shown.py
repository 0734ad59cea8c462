"""A plan as a table of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.text import Text

from autoamp.inspect.text import (
    WIDTH,
    as_text,
    bytes_text,
    plain_table,
    seconds_text,
)
from autoamp.planning.record import Planned, PlannedWay

PEAK = (
    "The peak is the most memory held at one time. It is not the sum of the lines "
    "above: activations are freed while gradients are made, and temporary values "
    "count. It leaves out temporary values of the optimizer, the libraries of the "
    "device and the allocator's reserves."
)

_SIZES: dict[str, Callable[[PlannedWay], int]] = {
    "weights": lambda way: way.weights,
    "gradients": lambda way: way.gradients,
    "optimizer state": lambda way: way.optimizer,
    "saved activations": lambda way: way.saved,
    "low copies of weights": lambda way: way.copies,
}


def text(plan: Planned) -> str:
    """The plan as plain text."""
    return as_text([*_parts(plan)], WIDTH)


def _parts(plan: Planned) -> Iterator[RenderableType]:
    names = [way.name for way in plan.ways]
    table = plain_table("", numbers=names)
    if all(way.seconds is not None for way in plan.ways):
        work = "time of a step" if plan.trains else "time of a call"
        times = [seconds_text(way.seconds or 0.0) for way in plan.ways]
        table.add_row(work, *times)
        speeds = [plan.per_second(way) for way in plan.ways]
        if all(speed is not None for speed in speeds):
            unit = "tokens" if plan.tokens else "samples"
            shown = [f"{speed or 0.0:,.0f}" for speed in speeds]
            table.add_row(f"{unit} a second", *shown)
    for title, size in _SIZES.items():
        sizes = [size(way) for way in plan.ways]
        if any(sizes):
            table.add_row(title, *map(bytes_text, sizes))
    table.add_row("peak memory", *(bytes_text(way.peak) for way in plan.ways))
    if plan.memory is not None:
        fits = ["yes" if plan.fits(way) else "no" for way in plan.ways]
        table.add_row(f"fits {bytes_text(plan.memory)}", *fits)
    yield from map(Text, _head(plan))
    yield table
    for sentence in (PEAK, *plan.notes):
        yield Text(textwrap.fill(sentence, WIDTH))


def _head(plan: Planned) -> Iterator[str]:
    yield f"autoamp plan: {plan.model}, {_count(plan.parameters)} parameters"
    batch = [
        f"{count:,} {unit}"
        for count, unit in ((plan.samples, "samples"), (plan.tokens, "tokens"))
        if count
    ]
    work = f"training with {plan.optimizer}" if plan.trains else "inference"
    yield ", ".join([work, *batch])
    yield f"predicted for {plan.hardware}, compute dtype {plan.precision}"


def _count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"
