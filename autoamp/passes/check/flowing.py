"""Finds the values of a graph that a gradient flows into.

An ATen graph goes in, and autograd is asked about each of its calls, on tensors of no
data.  Recorded values do not tell: the rewrite records its own without gradients.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.passes.see.nodes import tensors_of


def flowing_in(graph: fx.Graph) -> set[fx.Node]:
    """The values that a gradient flows into, as autograd says of tensors of no data."""
    found: set[fx.Node] = set()
    memo: dict[Any, bool] = {}
    recording = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.target is compat.SET_GRAD:
            recording = bool(node.args[0])
        elif node.op in ("placeholder", "get_attr"):
            trained = node.meta.get("autoamp_requires_grad", False)
            if trained or any(
                t.requires_grad for t in tensors_of(node.meta.get("val"))
            ):
                found.add(node)
        elif node.op == "call_function" and recording:
            results = tensors_of(node.meta.get("val"))
            if not any(t.is_floating_point() or t.is_complex() for t in results):
                continue
            operands = [n for n in node.all_input_nodes if n in found]
            if operands and _passes(node, found, memo):
                found.add(node)
    return found


def _passes(node: fx.Node, flowing: Collection[fx.Node], memo: dict[Any, bool]) -> bool:
    """Whether autograd records a call; taken for granted where it cannot be asked."""
    target = node.target
    if not isinstance(target, compat.OpOverload):
        return True
    flows = [n in flowing for n in node.all_input_nodes]
    leaves = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    literals = [leaf for leaf in leaves if not isinstance(leaf, fx.Node)]
    key = (target, *flows, *map(repr, literals))
    if key not in memo:
        memo[key] = _asked(node, flowing)
    return memo[key]


def _asked(node: fx.Node, flowing: Collection[fx.Node]) -> bool:
    def empty(operand: fx.Node) -> Any:
        value = operand.meta.get("val")
        if isinstance(value, torch.SymInt):
            return compat.hint(value)
        if not isinstance(value, Tensor):
            raise TypeError("not a tensor")
        flows = operand in flowing and value.is_floating_point()
        return compat.like(value, device="meta").requires_grad_(flows)

    try:
        with compat.on_real_numbers(), torch.enable_grad():
            args, kwargs = fx.map_arg((node.args, node.kwargs), empty)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("meta")}
            assert callable(node.target)
            made = node.target(*args, **kwargs)
    except Exception:  # noqa: BLE001  # the op has no meta kernel, or writes to a leaf
        return True
    return any(t.requires_grad for t in tensors_of(made))
