"""Turns a rewritten graph into one for a compiler, instead of running it as it is."""

from __future__ import annotations

from torch import fx

from autoamp import compat
from autoamp.graph_functions import (
    FOR_COMPILERS,
    checkpointed,
    scale_grad,
    traced_scale_grad_,
    traced_scale_grad_apart,
)
from autoamp.scaling.edge import SHARED

_CHANGED = frozenset({checkpointed, *FOR_COMPILERS})


def for_compilers(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm` in the form AOT autograd takes; `gm` itself where nothing needs changing.

    Checkpointed regions become torch's own op, which AOT autograd partitions.  A
    rewritten graph run as it is calls `torch.utils.checkpoint`; AOT autograd would
    trace into that call and keep every activation.  The ops of the loss scale's
    boundary become plain ops.
    """
    if not any(n.target in _CHANGED for n in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, values))
    for old, new in values.items():
        new.meta = dict(old.meta)
        if old.target in FOR_COMPILERS:
            new.target = FOR_COMPILERS[old.target]
            if old.target is scale_grad and old.all_input_nodes[0].op == "placeholder":
                new.target = traced_scale_grad_
            elif old.meta.get(SHARED):
                new.target = traced_scale_grad_apart
        elif old.target is checkpointed:
            new.target = compat.CHECKPOINT
            new.kwargs = {"use_reentrant": False, **new.kwargs}
    return fx.GraphModule(gm, graph)
