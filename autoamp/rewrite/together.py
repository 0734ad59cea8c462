"""Puts one call in the place of the uses of several weights: see `low_weights`.

    use = low_weight(weight, copy);  use_1 = low_weight(weight_1, copy_1)

becomes

    uses = low_weights(weight, weight_1, copy, copy_1)
    use = uses[0];  use_1 = uses[1]

The weights of a group follow each other in the forward, so that the backward has their
gradients one soon after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import tensors_of, written_values
from autoamp.graph_functions import (
    low_weight,
    low_weight_unscaled,
    low_weights,
    low_weights_unscaled,
)
from autoamp.rewrite.copied import copied

MOST = 32
"""Weights of a group."""

MOST_BYTES = 2**26
"""Bytes of the low gradients of a group, which wait for each other."""

_TOGETHER: dict[Any, Callable[..., Any]] = {
    low_weight: low_weights,
    low_weight_unscaled: low_weights_unscaled,
}


def with_uses_together(
    gm: fx.GraphModule, left: Collection[str] = ()
) -> fx.GraphModule:
    """`gm` with the uses of weights in groups; `gm` itself where there is no group.

    Graphs inside (checkpointed regions, branches) stay as they are.

    Args:
        left: names of nodes that stay as they are.
    """
    groups = [*_groups(gm.graph, left)]
    if not groups:
        return gm
    copy, new = copied(gm)
    for group in groups:
        _put_together([new[node] for node in group])
    return copy


def _groups(graph: fx.Graph, left: Collection[str]) -> Iterator[list[fx.Node]]:
    """Uses that may be made at the place of the first of them, two or more."""
    written = {
        compat.storage_id(tensor)
        for node in graph.nodes
        for value in written_values(node)
        for tensor in tensors_of(value.meta.get("val"))
    }
    group: list[fx.Node] = []
    for node in graph.nodes:
        is_use = node.target in _TOGETHER and node.name not in left
        if is_use and _is_of_inputs(node, written):
            if group and not _fits(group, node):
                yield from _of_several(group)
                group = []
            group.append(node)
        elif node.target in compat.MODE_CHANGES:
            yield from _of_several(group)
            group = []
    yield from _of_several(group)


def _of_several(group: list[fx.Node]) -> Iterator[list[fx.Node]]:
    if len(group) > 1:
        yield group


def _is_of_inputs(use: fx.Node, written: Collection[int]) -> bool:
    """Whether all operands are inputs that nothing in the graph writes to.

    The `found_inf` of a loss scale is written to by backwards alone.
    """
    return all(
        operand.op == "placeholder"
        and type(value := operand.meta.get("val")) is not None
        and isinstance(value, torch.Tensor)
        and compat.storage_id(value) not in written
        for operand in use.all_input_nodes
    )


def _fits(group: list[fx.Node], use: fx.Node) -> bool:
    first = group[0]
    sizes = [compat.hint(n.meta["val"].numel()) for n in (*group, use)]
    return (
        len(group) < MOST
        and sum(sizes) * use.meta["val"].itemsize <= MOST_BYTES
        and use.target is first.target
        and use.args[2:] == first.args[2:]
        and use.meta["val"].device == first.meta["val"].device
        and use.meta["val"].dtype == first.meta["val"].dtype
    )


def _put_together(uses: list[fx.Node]) -> None:
    first = uses[0]
    weights, copies = ([use.args[at] for use in uses] for at in (0, 1))
    args = (*first.args[2:], *weights, *copies)
    with first.graph.inserting_before(first):
        call = first.graph.call_function(_TOGETHER[first.target], args)
    call.meta = {**first.meta, "val": tuple(use.meta["val"] for use in uses)}
    for at, use in enumerate(uses):
        use.target, use.args = operator.getitem, (call, at)
