"""Which values of a graph carry gradients at their true value, inside it too.

Gradients are scaled for the sake of low-precision ops.  An fp32 op between such an op
and the edge of the graph needs no scale, and where to take it off is a choice: an
embedding's table is far larger than the rows looked up, and a loss far smaller than the
logits that are returned beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import Facts
from autoamp.dtypes import HIGH_DTYPE


def true_values(
    graph: fx.Graph, facts: Facts, given: Iterable[fx.Node], edges: Iterable[fx.Node]
) -> set[fx.Node]:
    """The nodes of `graph` whose gradient is to be unscaled.

    To begin with those are its differentiable inputs `given` and the results `edges`,
    which callers see.  An fp32 op joins them where all that it differentiates has
    joined and is at least as large as its result: the scale comes off no larger tensor.
    """
    found = {*given, *edges}
    for node in graph.nodes:
        if node in found or not _may_join(node, facts):
            continue
        read = [n for n in node.all_input_nodes if _differentiable(n, facts)]
        if read and found.issuperset(read) and _numel(node) <= sum(map(_numel, read)):
            found.add(node)
    return found


def _may_join(node: fx.Node, facts: Facts) -> bool:
    """Whether `node` is a differentiable fp32 op of the model that writes nothing."""
    value = node.meta.get("val")
    fact = facts.nodes.get(node.name)
    return (
        isinstance(node.target, compat.OpOverload)
        and isinstance(value, torch.Tensor)
        and value.dtype == HIGH_DTYPE
        and fact is not None
        and fact.requires_grad
        and fact.storage not in facts.mutated
    )


def _differentiable(node: fx.Node, facts: Facts) -> bool:
    """Whether a gradient flows into operand `node`; into what we inserted it does."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not (
        value.is_floating_point() or value.is_complex()
    ):
        return False
    fact = facts.nodes.get(node.name)
    return fact.requires_grad if fact is not None else node.op == "call_function"


def _numel(node: fx.Node) -> int:
    return math.prod(compat.hint(size) for size in node.meta["val"].shape)
