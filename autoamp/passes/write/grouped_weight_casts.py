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
from autoamp.passes.functions import (
    layer_norm,
    low_weight,
    low_weight_unscaled,
    low_weights,
    low_weights_unscaled,
    rms_norm,
    unscale_grad,
    unscaled_weights,
)
from autoamp.passes.see.nodes import tensors_of, written_values
from autoamp.passes.write.copied import copied

MOST = 32
"""Weights of a group."""

MOST_BYTES = 2**26
"""Bytes of the low gradients of a group, which wait for each other."""

_TOGETHER: dict[Any, Callable[..., Any]] = {
    low_weight: low_weights,
    low_weight_unscaled: low_weights_unscaled,
    unscale_grad: unscaled_weights,
}

_OWN: dict[Any, int] = {low_weight: 2, low_weight_unscaled: 2, unscale_grad: 1}
"""How many of the operands of a use are its own: the others are those of all."""


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
        uses = [new[node] for node in group]
        first, count = uses[0], _OWN[uses[0].target]
        operands = [use.args[at] for at in range(count) for use in uses]
        with first.graph.inserting_before(first):
            call = first.graph.call_function(
                _TOGETHER[first.target], (*first.args[count:], *operands)
            )
        call.meta = {**first.meta, "val": tuple(use.meta["val"] for use in uses)}
        for at, use in enumerate(uses):
            use.target, use.args = operator.getitem, (call, at)
    return copy


def _groups(graph: fx.Graph, left: Collection[str]) -> Iterator[list[fx.Node]]:
    """Uses that may be made at the place of the first of them, two or more."""
    written = {
        compat.storage_id(tensor)
        for node in graph.nodes
        for value in written_values(node)
        for tensor in tensors_of(value.meta.get("val"))
    }
    groups: dict[Any, list[fx.Node]] = {target: [] for target in _TOGETHER}
    for node in graph.nodes:
        group = groups.get(node.target, [])
        # A use made under `no_grad` records nothing and may not join one that does.
        if node.target in compat.MODE_CHANGES:
            yield from _of_several(groups)
        elif node.target in _TOGETHER and node.name not in left:
            if not _may_join(node, written):
                continue
            # The first weight that does not fit ends the group: its members stay
            # neighbours.
            if group and not _fits(group, node):
                yield from _of_several({node.target: group})
            group.append(node)
    yield from _of_several(groups)


def _may_join(use: fx.Node, written: Collection[int]) -> bool:
    """Whether all operands of a use are inputs, and nothing sees that it moves.

    Nothing in the graph writes to such an input; to the `found_inf` of a loss scale
    backwards alone write.  Readers of an fp32 use must not see that it is an alias of
    the weight.
    """
    for operand in use.all_input_nodes:
        value = operand.meta.get("val")
        if operand.op != "placeholder" or not isinstance(value, torch.Tensor):
            return False
        if compat.storage_id(value) in written:
            return False
    return use.target is not unscale_grad or all(
        reader.target in (layer_norm, rms_norm)
        or (
            isinstance(reader.target, compat.OpOverload)
            and not any(r.alias_info for r in compat.schema(reader.target).returns)
        )
        for reader in use.users
    )


def _fits(group: list[fx.Node], use: fx.Node) -> bool:
    first, count = group[0], _OWN[use.target]
    weight, others = use.meta["val"], [n.meta["val"] for n in group]
    numel = sum(compat.hint(value.numel()) for value in (*others, weight))
    return (
        len(group) < MOST
        and numel * weight.itemsize <= MOST_BYTES
        and use.target is first.target
        and use.args[count:] == first.args[count:]
        and weight.device == others[0].device
        and weight.dtype == others[0].dtype
    )


def _of_several(groups: dict[Any, list[fx.Node]]) -> Iterator[list[fx.Node]]:
    """The groups that are groups; all begin anew."""
    for group in groups.values():
        if len(group) > 1:
            yield [*group]
        group.clear()
