"""Hands a rewritten graph to a compiler instead of running it as it is."""

from __future__ import annotations

from torch import fx

from autoamp import compat
from autoamp.graph_functions import checkpointed


def for_compilers(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm` with checkpointed regions as torch's own op, which AOT autograd partitions.

    Run as it is, a rewritten graph calls `torch.utils.checkpoint`; AOT autograd would
    trace into that and keep every activation.
    """
    if not any(n.target is checkpointed for n in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, values))
    for old, new in values.items():
        new.meta = dict(old.meta)
        if old.target is checkpointed:
            new.target = compat.CHECKPOINT
            new.kwargs = {"use_reentrant": False, **new.kwargs}
    return fx.GraphModule(gm, graph)
