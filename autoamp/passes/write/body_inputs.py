"""Hands a body low what the body reads low alone.

The body of a checkpoint runs again in the backward, so that its inputs are kept until
then, and in fp32 take twice the memory that autocast's take.  The graph that calls the
body casts such an input, as for any other low reader, or has it low already.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx

from autoamp.passes.graph_record import Rewritten
from autoamp.passes.ops import bodies_of
from autoamp.passes.see.low_outside import LOW_OUTSIDE
from autoamp.passes.see.regions import shared_inputs
from autoamp.passes.write.copied import copied
from autoamp.passes.write.emitted import CAST_KIND, dtype_of

_COPY, _TO = torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype


def casts_of_inputs(body: fx.GraphModule) -> dict[int, list[fx.Node]]:
    """The inputs, by their positions, that casts alone read; with the casts.

    Several casts stand in several regions of grad mode or autocast.  Their gradients
    are summed in the dtype of the input, as autocast does where it has the input low.
    """
    found = {}
    for at, node in enumerate(body.graph.find_nodes(op="placeholder")):
        casts = [
            reader
            for reader in node.users
            if reader.target is _COPY and reader.meta.get(CAST_KIND) == "down"
        ]
        is_alone = len(casts) == 1 or LOW_OUTSIDE in node.meta
        if casts and is_alone and len(casts) == len(node.users):
            found[at] = casts
    return found


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
    if all(now is was for was, now in zip(work.bodies, found, strict=True)):
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
    each = [found for at, found in casts_of_inputs(body.gm).items() if at in positions]
    if not each:
        return body
    gm, copies = copied(body.gm)
    for cast in itertools.chain(*each):
        node, dtype = copies[cast], cast.kwargs["dtype"]
        node.target, node.args, node.kwargs = _TO, (*node.args, dtype), {}
    names = {cast.name for cast in itertools.chain(*each)}
    kept = tuple(cast for cast in body.casts if cast.name not in names)
    return replace(body, gm=gm, casts=kept)
