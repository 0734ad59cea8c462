"""Takes the masks of attention away that are causal, which is told, or hide no key."""

from __future__ import annotations

from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import KERNEL, ForChain
from autoamp.kernels.causal_mask.recognise import (
    ATTENTION,
    DROPOUT,
    MASK,
    needless_choices,
    needless_masks,
)
from autoamp.kernels.shared.condition import Allowed
from autoamp.kernels.shared.positions.reading import Positions
from autoamp.kernels.table import CAUSAL_MASK, NO_MASK


def without_masks(graph: fx.Graph, _: compat.FakeTensorMode, allowed: Allowed) -> bool:
    """Takes masks away that attention can do without; whether there was any."""
    if not graph.find_nodes(op="call_function", target=ATTENTION):
        return False
    positions = Positions(graph)
    found = [
        (node, name)
        for node, causal in needless_masks(graph, positions)
        if (name := CAUSAL_MASK if causal else NO_MASK) not in allowed.off
        and allowed.takes([node])
    ]
    biased = [
        (node, bias)
        for node, bias in needless_choices(graph, positions)
        if NO_MASK not in allowed.off and allowed.takes([node, node.args[MASK]])  # type: ignore[list-item]
    ]
    for node, name in found:
        _without_mask(node, name)
    for node, bias in biased:
        _with_bias(graph, node, bias)
    return bool(found or biased)


def _without_mask(attention: fx.Node, name: str) -> None:
    """Takes the mask of a call away, and tells the call whether it is causal."""
    dropout = attention.args[DROPOUT] if len(attention.args) > DROPOUT else 0.0
    causal = name == CAUSAL_MASK
    attention.args = (*attention.args[:MASK], None, dropout, causal)
    _note(attention, name)


def _with_bias(graph: fx.Graph, attention: fx.Node, bias: fx.Node) -> None:
    """Puts a call of attention that reads a bias in the place of one with a mask."""
    args = (*attention.args[:MASK], bias, *attention.args[MASK + 1 :])
    with graph.inserting_before(attention):
        call = graph.call_function(ATTENTION, args, attention.kwargs)
    call.meta = dict(attention.meta)
    _note(call, NO_MASK)
    attention.replace_all_uses_with(call)
    graph.erase_node(attention)


def _note(attention: fx.Node, name: str) -> None:
    known = attention.meta.get(KERNEL)
    calls = 2 if known is None else known.calls + 1
    named = name if known is None else known.kernel
    attention.meta[KERNEL] = ForChain(named, calls, widens=False)
