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
            _take_over(node, made)


def made_of(
    node: fx.Node, value: Callable[[fx.Node], Any], mode: compat.FakeTensorMode
) -> Any:
    """The result of a node's call for operands that lie like the tensors `value`."""
    if isinstance(node.target, compat.OpOverload) and is_view(node.target):
        # Meta tensors go through torch's own code for views, as real tensors do.
        with contextlib.suppress(NotImplementedError):  # torch has no meta kernel
            return called(node, lambda n: compat.like(value(n), device="meta"))
    with mode, compat.as_traced(), torch.no_grad():
        return called(node, lambda n: compat.like(value(n), device=_device(n)))


def _device(node: fx.Node) -> torch.device | None:
    """The device of a node's value, which `made_of` may have made on meta."""
    return next((t.device for t in tensors_of(node.meta.get("val"))), None)


def called(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """The result of a node's call for the operands `value`."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _take_over(node: fx.Node, made: Any) -> None:
    recorded, spec = pytree.tree_flatten(node.meta["val"])
    leaves = zip(recorded, pytree.tree_leaves(made), strict=True)
    node.meta["val"] = pytree.tree_unflatten(
        [
            compat.with_strides(one, other.stride()) if torch.is_tensor(one) else one
            for one, other in leaves
        ],
        spec,
    )


def _plain(value: Any) -> list[torch.Tensor]:
    return [t for t in tensors_of(value) if t.layout == torch.strided]


def _strides(value: Any) -> list[list[int]]:
    return [[compat.hint(s) for s in t.stride()] for t in _plain(value) if t.numel()]
