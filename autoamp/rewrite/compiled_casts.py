"""What inductor makes of the casts in a graph, noted in the graph for the report."""

from __future__ import annotations

from torch import fx

from autoamp import compat
from autoamp.rewrite.emitted import CAST_KIND

CAST_FATE = "autoamp_cast_fate"
"""Set in the `meta` of a cast that inductor compiles: what becomes of the cast."""

EXACT_CASTS = "autoamp_exact_casts"
"""Set in the `meta` of a graph that inductor compiles: whether its kernels round at
each cast; None where torch does not tell."""


def casts_to_read(gm: fx.GraphModule) -> compat.CastReading:
    """The casts of a graph by name, before inductor compiles the graph.

    A cast whose name a node of a body has as well is left out: inductor's graph holds
    the nodes of both.
    """
    inside = {
        node.name
        for name, body in gm.named_modules()
        if name and isinstance(body, fx.GraphModule)
        for node in body.graph.nodes
    }
    names = (
        n.name for n in gm.graph.nodes if n.op != "placeholder" and CAST_KIND in n.meta
    )
    return compat.CastReading(tuple(name for name in names if name not in inside))


def note_casts(gm: fx.GraphModule, reading: compat.CastReading) -> None:
    """Notes in a graph what inductor has made of its casts."""
    gm.meta[EXACT_CASTS] = reading.rounded
    for node in gm.graph.nodes:
        if node.name in reading.fates:
            node.meta[CAST_FATE] = reading.fates[node.name]
