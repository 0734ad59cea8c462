"""Finds the values inside a graph that carry true gradients.

Gradients are scaled for the sake of low-precision ops.  An fp32 op between such an op
and the edge of the graph needs no loss scale, so that the tensor at which the scale is
put on or taken off is a choice: an embedding's table is far larger than the rows looked
up, and a loss far smaller than the logits that are returned beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import argument
from autoamp.dtypes import HIGH_DTYPE


def true_values(
    graph: fx.Graph,
    edges: Collection[fx.Node],
    flows: Callable[[fx.Node], bool],
    plain: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """The nodes of `graph` whose gradients are left true, without scaling.

    An fp32 op is such a node where each operand is such a node, or an fp32 edge, and
    where all operands together are at least as large as the op's result: the scale
    comes off no larger tensor.  (The sizes do not count where the op's backward gives a
    sparse gradient, which only a leaf can take.)

    Args:
        edges: inputs, where gradients leave the graph, and results, where they enter.
        flows: whether a gradient flows through a node.
        plain: whether a node is a torch op on memory that nothing writes to.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not (plain(node) and flows(node) and _is_fp32(node)):
            continue
        read = [n for n in node.all_input_nodes if _is_float(n) and flows(n)]
        if (
            read
            and all(_is_fp32(n) and (n in found or n in edges) for n in read)
            and (_numel(node) <= sum(map(_numel, read)) or _gives_sparse(node))
        ):
            found.add(node)
    return found


def _gives_sparse(node: fx.Node) -> bool:
    return argument(node, "sparse", False) is True


def _is_fp32(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == HIGH_DTYPE


def _is_float(node: fx.Node) -> bool:
    """Whether a node is a tensor, or several, that may carry gradients."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or (
        value.is_floating_point() or value.is_complex()
    )


def _numel(node: fx.Node) -> int:
    return math.prod(compat.hint(size) for size in node.meta["val"].shape)
