"""Hands a body low what the body reads low alone.

The body of a checkpoint runs again in the backward, so that its inputs are kept until
then, and in fp32 take twice the memory that autocast's take.  The graph that calls the
body casts such an input, as for any other low reader, or has it low already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx

from autoamp.passes.graph_record import Rewritten
from autoamp.passes.ops import bodies_of
from autoamp.passes.see.regions import shared_inputs
from autoamp.passes.write.copied import copied
from autoamp.passes.write.emitted import CAST_KIND, dtype_of

_COPY, _TO = torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype


def casts_of_inputs(body: fx.GraphModule) -> dict[int, fx.Node]:
    """The inputs, by their positions, whose one reader is a cast; with the cast.

    The gradients of several readers are summed in fp32 behind the casts, and would be
    summed in the compute dtype if the input had it.
    """
    readers = {
        at: next(iter(node.users))
        for at, node in enumerate(body.graph.find_nodes(op="placeholder"))
        if len(node.users) == 1
    }
    return {
        at: reader
        for at, reader in readers.items()
        if reader.target is _COPY and reader.meta.get(CAST_KIND) == "down"
    }


def with_low_inputs(work: Rewritten, left: Collection[str] = ()) -> Rewritten:
    """`work` with bodies that copy nothing of the inputs that they are given low.

    Args:
        left: names of calls whose bodies stay as they are.
    """
    low: dict[fx.GraphModule, set[int]] = defaultdict(set)
    for call in work.gm.graph.nodes:
        if call.name in work.assignment.low and call.name not in left:
            for body in bodies_of(call):
                given = shared_inputs(call, body)
                low[body] |= {at for at, node in given if dtype_of(node) == work.low}
    found = [_given_low(body, low.get(body.gm, ())) for body in work.bodies]
    if found == [*work.bodies]:
        return work
    pairs = list(zip(work.bodies, found, strict=True))
    gms = []
    for gm in (work.gm, work.before):
        gms.append(copied(gm)[0])
        for name, child in gm.named_children():
            for was, now in pairs:
                if child is was.gm:
                    setattr(gms[-1], name, now.gm)
    return replace(work, gm=gms[0], before=gms[1], bodies=tuple(found))


def _given_low(body: Rewritten, positions: Collection[int]) -> Rewritten:
    """The record of a body whose inputs at `positions` are given in the compute dtype.

    Their casts become `to`, which copies nothing of a tensor that has the dtype.
    """
    gm, nodes = copied(body.gm)
    casts = [nodes[c] for at, c in casts_of_inputs(body.gm).items() if at in positions]
    if not casts:
        return body
    for cast in casts:
        dtype = cast.kwargs["dtype"]
        cast.target, cast.args, cast.kwargs = _TO, (*cast.args, dtype), {}
    names = {cast.name for cast in casts}
    kept = tuple(cast for cast in body.casts if cast.name not in names)
    return replace(body, gm=gm, casts=kept)
