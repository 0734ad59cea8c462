"""A plan for a mesh as tables of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from autoamp.inspect.text import (
    WIDTH,
    as_text,
    bytes_text,
    plain_table,
    seconds_text,
)

if TYPE_CHECKING:
    from autoamp.meshes.collectives import Transfer
    from autoamp.meshes.record import MeshWay, PlannedMesh, Scale

ASSUMED = (
    "Assumed: tp's collectives are waited for; DDP reduces gradients beside the last "
    "backward; FSDP2 gathers and reduces beside the computation; stages run one "
    "forward and one backward in turn. Links are counted at their data sheets' "
    "speed: times are an order of magnitude."
)

_SHORT = {"torch.autocast": "autocast", "autoamp, FSDP2": "+ FSDP2"}


def text(plan: PlannedMesh) -> str:
    """The plan as plain text."""
    return as_text([*_parts(plan)], WIDTH)


def _parts(plan: PlannedMesh) -> Iterator[RenderableType]:
    yield from map(Text, _head(plan))
    yield Text("")
    yield _device(plan)
    yield Text("")
    yield _sent(plan)
    yield Text("")
    yield _scales(plan)
    yield Text("")
    for sentence in (ASSUMED, *plan.notes):
        yield Text(textwrap.fill(sentence, WIDTH))


def _head(plan: PlannedMesh) -> Iterator[str]:
    yield f"autoamp plan: {plan.model}, {plan.parameters / 1e9:.3g} billion parameters"
    yield (
        f"{plan.here.devices:,} x {plan.hardware} ({plan.here.mesh}), "
        f"{plan.node} a node, {plan.network} Gb/s each"
    )
    batch = [
        f"{count:,} {unit}"
        for count, unit in ((plan.samples, "samples"), (plan.tokens, "tokens"))
        if count
    ]
    yield (
        f"training with {plan.optimizer}, compute dtype {plan.precision}, "
        f"{plan.here.microbatches} micro-batches of {', '.join(batch) or 'a call'}"
    )


def _names(plan: PlannedMesh) -> list[str]:
    return [_SHORT.get(way.name, way.name) for way in plan.ways]


def _device(plan: PlannedMesh) -> RenderableType:
    names = _names(plan)
    table = plain_table("one device", numbers=names)
    ways = plan.ways
    table.add_row("time of a step", *(seconds_text(way.seconds) for way in ways))
    rows = {
        "  computing": [way.compute for way in ways],
        "  waiting for tp": [way.within_layers for way in ways],
        "  waiting for dp and pp": [way.exposed for way in ways],
        "  waiting for stages": [way.bubble for way in ways],
        "  optimizer": [way.optimizer_step for way in ways],
    }
    for title, values in rows.items():
        if any(values):
            table.add_row(title, *(seconds_text(value) for value in values))
    if plan.tokens:
        table.add_row("tokens a second", *(_rate(plan.here, way) for way in ways))
    stages = [way.fullest for way in ways]
    sizes = {
        "weights": [stage.weights for stage in stages],
        "gradients": [stage.gradients for stage in stages],
        "optimizer state": [stage.optimizer for stage in stages],
        "saved activations": [stage.saved for stage in stages],
        "low or gathered weights": [stage.copies for stage in stages],
        "peak memory": [stage.peak for stage in stages],
    }
    for title, numbers in sizes.items():
        if any(numbers):
            table.add_row(title, *map(bytes_text, numbers))
    if plan.memory is not None:
        fits = ["yes" if plan.fits(way) else "no" for way in ways]
        table.add_row(f"fits {bytes_text(plan.memory)}", *fits)
    return table


def _sent(plan: PlannedMesh) -> RenderableType:
    table = plain_table(
        "sent in a step", "", "link", numbers=["count", "bytes", "time"]
    )
    for way, name in zip(plan.ways, _names(plan), strict=True):
        title = name
        for (what, link), rows in _alike(way).items():
            table.add_row(
                title,
                what,
                link,
                f"{sum(row.count for row in rows):,}",
                bytes_text(sum(row.wire for row in rows)),
                seconds_text(sum(row.seconds for row in rows)),
            )
            title = ""
    return table


def _alike(way: MeshWay) -> dict[tuple[str, str], list[Transfer]]:
    """The transfers of a way by what they are, whatever their phase and size."""
    found: dict[tuple[str, str], list[Transfer]] = {}
    for row in way.transfers:
        key = f"{row.axis} {row.kind} {row.dtype}", row.link
        found.setdefault(key, []).append(row)
    return found


def _scales(plan: PlannedMesh) -> RenderableType:
    table = plain_table("devices", "", numbers=_names(plan))
    for scale in plan.scales:
        ways = scale.ways
        if scale.tokens:
            speeds = [_rate(scale, way) for way in ways]
            table.add_row(f"{scale.devices:,}", "tokens a second", *speeds)
        times = [seconds_text(way.seconds) for way in ways]
        table.add_row("" if scale.tokens else f"{scale.devices:,}", "step", *times)
        waits = [f"{1 - way.compute / way.seconds:.0%}" for way in ways]
        table.add_row("", "not computing", *waits)
        peaks = [bytes_text(way.fullest.peak) for way in ways]
        table.add_row("", f"peak, {scale.mesh}", *peaks)
    return table


def _rate(scale: Scale, way: MeshWay) -> str:
    """Tokens a second, in thousands or millions where they are many."""
    speed = (scale.tokens or 0) / way.seconds
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if speed >= unit:
            return (
                f"{speed / unit:,.3g} {name}"
                if speed < 1e9
                else f"{speed / unit:,.0f} {name}"
            )
    return f"{speed:,.0f}"
