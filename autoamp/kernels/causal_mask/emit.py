"""Tells attention that it is causal, in the place of a mask that says so."""

from __future__ import annotations

from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import KERNEL, ForChain
from autoamp.kernels.causal_mask.recognise import DROPOUT, MASK, causal_attention
from autoamp.kernels.shared.condition import Allowed
from autoamp.kernels.table import CAUSAL_MASK


def tell_causal(graph: fx.Graph, _: compat.FakeTensorMode, allowed: Allowed) -> bool:
    """Tells attention with a causal mask that it is causal; whether there was any."""
    if CAUSAL_MASK in allowed.off:
        return False
    found = [node for node in causal_attention(graph) if allowed.takes([node])]
    for node in found:
        _without_mask(node)
    return bool(found)


def _without_mask(attention: fx.Node) -> None:
    """Tells a call of attention that it is causal, and takes its mask away."""
    dropout = attention.args[DROPOUT] if len(attention.args) > DROPOUT else 0.0
    attention.args = (*attention.args[:MASK], None, dropout, True)
    known = attention.meta.get(KERNEL)
    calls = 2 if known is None else known.calls + 1
    name = CAUSAL_MASK if known is None else known.kernel
    attention.meta[KERNEL] = ForChain(name, calls, widens=False)
