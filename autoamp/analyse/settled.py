"""For which graphs Dynamo's own fake tensors can stand for the values of the nodes."""

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


def spellings_of(gm: fx.GraphModule, given: Sequence[Any]) -> Spellings | None:
    """For a graph that Dynamo captured with inputs such as `given`; None for another.

    Nor for one with symbolic sizes or loops, or one that gives a tensor other memory:
    Dynamo's tensors are as they are at the end of the graph.  (A tensor whose shape has
    changed since a call is told by that shape, and the call is traced.)
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
    return symbolic or node.target in CONTROL_FLOW or _sets_memory(node)


def _is_like(value: torch.Tensor, given: Any) -> bool:
    """Whether Dynamo's tensor for an input is like what is given for it."""
    if not isinstance(given, torch.Tensor) or given.layout != torch.strided:
        return False
    return description(given) == description(value)


def _sets_memory(node: fx.Node) -> bool:
    """Whether a call gives a tensor the memory of another, which no shape tells."""
    name = getattr(node.target, "__name__", str(node.target))
    return name.partition(".")[0] == "set_"
