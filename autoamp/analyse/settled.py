"""Whether what Dynamo has computed for a graph says what each node of it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.analyse.control_flow import CONTROL_FLOW
from autoamp.analyse.spelling import Spellings, description

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_MOVE = frozenset({"detach_", "resize_", "resize_as_", "set_"})
"""Ops that move a tensor, besides those that torch has tagged."""


def spellings_of(gm: fx.GraphModule, given: Sequence[Any]) -> Spellings | None:
    """For a graph that Dynamo captured with inputs such as `given`; None for another.

    Nor for one with symbolic sizes or loops, or one that moves a tensor to another
    shape or memory: what Dynamo's tensors are is what they are at the end.
    """
    nodes = gm.graph.nodes
    inputs = [n.meta.get("example_value") for n in nodes if n.op == "placeholder"]
    if not inputs or not all(compat.is_plain_fake(v) for v in inputs):
        return None
    modes = {id(v.fake_mode) for v in inputs}
    shared = len({id(v) for v in inputs}) < len(inputs)
    if len(modes) > 1 or shared or any(map(_is_beyond_us, nodes)):
        return None
    if any(not _is_like(v, other) for v, other in zip(inputs, given, strict=True)):
        return None
    return Spellings(inputs[0].fake_mode, inputs)


def _is_beyond_us(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("example_value"))
    sizes = [s for v in values for s in (v.shape if torch.is_tensor(v) else (v,))]
    symbolic = any(isinstance(size, _SYMBOLIC) for size in sizes)
    return symbolic or node.target in CONTROL_FLOW or _moves_a_tensor(node)


def _is_like(value: torch.Tensor, given: Any) -> bool:
    """Whether Dynamo's tensor for an input is like what is given for it."""
    if not isinstance(given, torch.Tensor) or given.layout != torch.strided:
        return False
    return description(given) == description(value)


def _moves_a_tensor(node: fx.Node) -> bool:
    """Whether a call may change the shape, the memory or the kind of an operand."""
    if node.op == "call_module":
        return True
    name = node.target if isinstance(node.target, str) else _name(node.target)
    if node.op not in ("call_function", "call_method") or not name.endswith("_"):
        return False
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in _MOVE:  # `requires_grad_`, and what nobody knows
        return True
    known = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.inplace_view in op.tags for op in known)


def _name(function: Any) -> str:
    """By which a function is known as one that writes: not `operator.and_`."""
    of_python = getattr(function, "__module__", None) == "_operator"
    name = getattr(function, "__name__", "").removesuffix("__")
    return "" if of_python else name
