"""Puts a kernel of torch's in the place of each chain that computes the same."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import KERNEL
from autoamp.kernels.chains.condition import Replacement, replaceable
from autoamp.kernels.shared.condition import Allowed


def put_kernels(graph: fx.Graph, mode: compat.FakeTensorMode, allowed: Allowed) -> bool:
    """Puts a kernel in the place of each chain of `graph`; whether any was put."""
    found = replaceable(graph, mode, allowed)
    made: dict[fx.Node, fx.Node] = {}
    for replacement in found:
        made[replacement.chain.result] = _put(graph, replacement, made)
    return bool(found)


def _put(
    graph: fx.Graph, replacement: Replacement, made: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """Puts one kernel into the graph.

    Args:
        made: the call of the kernel for each result of a chain that is replaced: this
            chain may read such a result.
    """
    chain, found = replacement.chain, replacement.kernel
    data, *vectors = (made.get(n, n) for n in (chain.data, *chain.vectors))
    weight = None if found.weight is None else vectors[found.weight]
    bias = None if found.bias is None else vectors[found.bias]
    size = chain.data.meta["val"].shape[-1]
    kernel = found.kernel
    with graph.inserting_before(chain.result):
        rest = kernel.arguments(size, weight, bias, found.epsilon)
        args = (data, *rest)
        node = graph.call_function(kernel.op, args, dict(kernel.keywords))
    node.meta = {**chain.result.meta, KERNEL: replacement.note}
    chain.result.replace_all_uses_with(node)
    for each in reversed(chain.nodes):
        graph.erase_node(each)
    return node
