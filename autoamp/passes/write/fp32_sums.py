"""Lets products of low tensors keep the fp32 sums of their kernels: see `product`.

    linear = linear(x, use);  linear_fp32 = _to_copy(linear, dtype=float32)

becomes, where nothing but the cast reads `linear`,

    linear = product(x, use, turned=True, wide=True)

and a product that alone reads the use of a weight, `use = low_weight(weight, copy)`,
becomes `product(x, weight, copy)`, whose backward has the gradient of `weight` in fp32
from the kernel that sums it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.passes.decide.devices import Device
from autoamp.passes.decide.sums import TURNED, fits, is_dense, pays
from autoamp.passes.functions import (
    low_weight,
    low_weight_unscaled,
    product,
    scaled_result,
)
from autoamp.passes.ops import has_effect
from autoamp.passes.write.copied import edited

_ATEN = torch.ops.aten
_CAST = _ATEN._to_copy.default


# -- results ---------------------------------------------------------------------------


def with_sums(
    gm: fx.GraphModule,
    device: Device,
    flowing: Collection[str],
    left: Collection[str] = (),
) -> fx.GraphModule:
    """`gm` with wide products where nothing but a cast to fp32 reads a low one.

    `gm` itself where there is none.

    Args:
        flowing: names of nodes through which a gradient flows: there a wide product is
            made only if it pays.
        left: names of nodes that stay as they are.
    """

    def found(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
        for node in graph.nodes:
            cast = _widened_by(node)
            if cast is None or node.name in left or cast.name in left:
                continue
            if node.name not in flowing or pays(_numel(node), device):
                yield node, cast

    def edit(graph: fx.Graph) -> None:
        for node, cast in [*found(graph)]:
            how: dict[str, Any] = {"wide": True}
            if TURNED[node.target]:
                how["turned"] = True
            if cast.target is scaled_result:
                how["loss_scale"] = cast.args[1]
            # No write and no change of grad mode lies between the two.
            cast.prepend(node)
            node.target, node.kwargs = product, how
            node.meta["val"] = cast.meta["val"]
            cast.replace_all_uses_with(node)
            graph.erase_node(cast)

    return edited(gm, edit, finds=lambda graph: any(found(graph)))


def is_wide(node: fx.Node) -> bool:
    """Whether a node is a low product that writes fp32 numbers."""
    return node.target is product and node.kwargs.get("wide", False) is True


def _widened_by(node: fx.Node) -> fx.Node | None:
    """The cast to fp32 that alone reads a low product; None at any other node."""
    if len(node.users) != 1 or not fits(node):
        return None
    (cast,) = node.users
    widens = cast.target is scaled_result or (
        cast.target is _CAST
        and len(cast.args) == 1
        and cast.kwargs == {"dtype": HIGH_DTYPE}
    )
    if not widens or not _is_low(node) or not all(map(_is_low, node.args)):
        return None
    return cast if _nothing_between(node, cast) else None


def _nothing_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether no write and no change of grad mode lies between two nodes."""
    node = first.next
    while node is not last:
        if has_effect(node) or node.target in compat.MODE_CHANGES:
            return False
        node = node.next
    return True


# -- gradients of weights --------------------------------------------------------------


@dataclass(frozen=True)
class _Weight:
    """A weight and its copy, by the only use of the copy that a product reads.

    Attributes:
        calls: the call that the product reads, and before it, if that is a transpose,
            the use itself.
        given: the weight and its copy.
        edge: 1/S and found_inf; empty without a loss scale.
    """

    calls: tuple[fx.Node, ...]
    given: tuple[fx.Node, fx.Node]
    edge: tuple[fx.Node, ...]


def with_weight_gradients(
    gm: fx.GraphModule, device: Device, left: Collection[str] = ()
) -> fx.GraphModule:
    """`gm` with products that give the gradients of weights in fp32, where that pays.

    `gm` itself where there is none.

    Args:
        left: names of nodes that stay as they are.
    """

    def found(graph: fx.Graph) -> Iterator[tuple[fx.Node, _Weight]]:
        for node in graph.nodes:
            weight = _weight_of(node)
            if weight is None or any(n.name in left for n in (node, *weight.calls)):
                continue
            # A product that is wide has a Function already.
            if node.target is product or pays(_numel(weight.given[0]), device):
                yield node, weight

    def edit(graph: fx.Graph) -> None:
        for node, weight in [*found(graph)]:
            data, _, bias = _operands(node)
            other = None if bias is data else _as_weight(bias, node)
            # The bias is read itself as well, where it is a weight whose gradient is
            # unscaled like that of the product's weight.
            of_bias = other if other is not None and other.edge == weight.edge else None
            given: tuple[Any, ...] = () if bias is None else (bias,)
            how = dict(node.kwargs)
            turned = how.pop("turned", False) or TURNED.get(node.target, False)
            if turned != (len(weight.calls) > 1):
                how["turned"] = True
            if weight.edge:
                how["edge"] = weight.edge
            if of_bias is not None:
                given = of_bias.given
            args = data, *weight.given, *given
            node.target, node.args, node.kwargs = product, args, how
            for each in (weight, of_bias):
                for call in reversed(each.calls if each is not None else ()):
                    graph.erase_node(call)

    return edited(gm, edit, finds=lambda graph: any(found(graph)))


def _weight_of(node: fx.Node) -> _Weight | None:
    """The weight that a product multiplies by; None at any other node."""
    if node.target not in TURNED and node.target is not product:
        return None
    data, factor, bias = _operands(node)
    if not _is_low(data) or (node.kwargs and node.target is not product):
        return None
    if bias is not None and not (_is_low(bias) and bias.meta["val"].dim() == 1):
        return None
    return None if factor is data else _as_weight(factor, node)


def _as_weight(read: Any, reader: fx.Node) -> _Weight | None:
    """The weight that `reader` alone reads, maybe as a transpose; None of all else."""
    is_transpose = getattr(read, "target", None) is _ATEN.t.default or (
        getattr(read, "target", None) is _ATEN.transpose.int
        and read.meta["val"].dim() == 2
        and read.args[1] != read.args[2]
    )
    calls = (read.args[0], read) if is_transpose else (read,)
    use, users = calls[0], (*calls[1:], reader)
    if getattr(use, "target", None) not in (low_weight, low_weight_unscaled):
        return None
    weight, copy, *edge = use.args
    value = weight.meta["val"]
    # Of a weight that is laid out across, torch gives such a gradient.
    if value.dtype != HIGH_DTYPE or value.dim() > 2 or not is_dense(value):
        return None
    alone = all({*c.users} == {u} for c, u in zip(calls, users, strict=True))
    if not alone or not _nothing_between(use, reader):
        return None
    return _Weight(calls, (weight, copy), tuple(edge))


# -- nodes -----------------------------------------------------------------------------


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """The data, the factor and the bias (or None) of a product."""
    if node.target is _ATEN.addmm.default:
        bias, data, factor = node.args
        return data, factor, bias
    data, factor, bias = (*node.args, None)[:3]
    return data, factor, bias


def _is_low(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype in LOW_DTYPES.values()


def _numel(node: fx.Node) -> int:
    return int(compat.hint(node.meta["val"].numel()))
