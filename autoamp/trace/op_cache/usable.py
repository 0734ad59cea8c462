"""Whether Dynamo's own fake tensors can be taken for the values of a graph's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.ops import lays_out_anew
from autoamp.trace.control_flow import CONTROL_FLOW
from autoamp.trace.op_cache.cache import OpCache
from autoamp.trace.op_cache.call_key import description

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def op_cache_for(gm: fx.GraphModule, given: Sequence[Any]) -> OpCache | None:
    """The cache for a graph that Dynamo captured with inputs like `given`, or None.

    The result is None for a graph with symbolic sizes, branches or loops.  The same
    holds for a graph that gives a tensor another shape or other memory, because
    Dynamo's tensors are as they are at the end of the graph.
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
    return OpCache(inputs[0].fake_mode, inputs)


def _is_beyond_us(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("example_value"))
    sizes = [s for v in values for s in (v.shape if torch.is_tensor(v) else (v,))]
    symbolic = any(isinstance(size, _SYMBOLIC) for size in sizes)
    return symbolic or node.target in CONTROL_FLOW or _lays_out_anew(node)


def _is_like(value: torch.Tensor, given: Any) -> bool:
    """Whether Dynamo's tensor for an input is like the value given for the input."""
    if not isinstance(given, torch.Tensor) or given.layout != torch.strided:
        return False
    return description(given) == description(value)


def _lays_out_anew(node: fx.Node) -> bool:
    """Whether a call changes the shape, the strides or the memory of its operand."""
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return name.endswith("_") and lays_out_anew(name)
