"""Records the strides that a graph's values have when the graph runs.

The ATen graph goes in, and recorded values of it are replaced.  For a dimension of size
1 torch's fake tensors give some views another stride than its kernels do.  No element
lies elsewhere, but the stride of such a dimension decides the layout that a convolution
gives its result, and so the strides of all values behind it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.passes.ops import is_view
from autoamp.passes.see.nodes import tensors_of


def record_strides(gm: fx.GraphModule) -> None:
    """Replaces the values in `gm` that are recorded with other strides than they get.

    Where sizes are symbolic the new strides are numbers, for the sizes at hand.
    """
    laid: dict[fx.Node, Any] = {}
    mode = compat.new_fake_mode(symbolic=False)
    for node in gm.graph.nodes:
        recorded = node.meta.get("val")
        if not isinstance(node.target, compat.OpOverload):
            continue
        may_differ = is_view(node.target) and any(
            1 in map(compat.hint, t.shape) for t in _plain(recorded)
        )
        if not may_differ and laid.keys().isdisjoint(node.all_input_nodes):
            continue
        made = recorded
        # The record stays where an op has no answer for such operands.
        with contextlib.suppress(Exception):
            made = made_of(node, lambda n: laid.get(n, n.meta.get("val")), mode)
        if _strides(made) != _strides(recorded):
            laid[node] = made
            leaves, spec = pytree.tree_flatten(recorded)
            pairs = zip(leaves, pytree.tree_leaves(made), strict=True)
            node.meta["val"] = pytree.tree_unflatten(
                [
                    compat.with_strides(a, b.stride()) if torch.is_tensor(a) else a
                    for a, b in pairs
                ],
                spec,
            )


def made_of(
    node: fx.Node, value: Callable[[fx.Node], Any], mode: compat.FakeTensorMode
) -> Any:
    """The result of a node's call for operands that lie like the tensors `value`."""
    if isinstance(node.target, compat.OpOverload) and is_view(node.target):
        # Meta tensors go through torch's own code for views, as real tensors do.
        with contextlib.suppress(NotImplementedError):  # torch has no meta kernel
            return called(node, lambda n: compat.like(value(n), device="meta"))

    def on_its_device(operand: fx.Node) -> Any:
        # `value` may be on meta: the recorded one tells the device.
        recorded = tensors_of(operand.meta.get("val"))
        device = recorded[0].device if recorded else None
        return compat.like(value(operand), device=device)

    with mode, compat.as_traced(), torch.no_grad():
        return called(node, on_its_device)


def called(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """The result of a node's call for the operands `value`."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _plain(value: Any) -> list[torch.Tensor]:
    return [t for t in tensors_of(value) if t.layout == torch.strided]


def _strides(value: Any) -> list[list[int]]:
    return [[compat.hint(s) for s in t.stride()] for t in _plain(value) if t.numel()]
