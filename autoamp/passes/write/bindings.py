"""The code that a graph runs as: its ops called by torch's own functions.

`torch.ops.aten.add.Tensor(a, b)` looks its operands up in a schema; `torch.add(a, b)`
has code for its own operands, takes less time, and calls the same op
(benchmarks/results/overhead.md has times of whole calls).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from autoamp.passes.write.copied import copied

_ATEN = torch.ops.aten
_CAST = _ATEN._to_copy.default

BINDINGS: dict[Any, Callable[..., Any]] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.addmm.default: torch.addmm,
    _ATEN.batch_norm.default: torch.batch_norm,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.cat.default: torch.cat,
    _ATEN.chunk.default: torch.chunk,
    _ATEN.clone.default: torch.clone,
    _ATEN.contiguous.default: Tensor.contiguous,
    _ATEN.conv1d.default: torch.conv1d,
    _ATEN.conv2d.default: torch.conv2d,
    _ATEN.conv3d.default: torch.conv3d,
    _ATEN.cos.default: torch.cos,
    _ATEN.div.Tensor: torch.div,
    _ATEN.dropout.default: torch.dropout,
    _ATEN.embedding.default: torch.embedding,
    _ATEN.exp.default: torch.exp,
    _ATEN.expand.default: Tensor.expand,
    _ATEN.flatten.using_ints: torch.flatten,
    _ATEN.gelu.default: functional.gelu,
    _ATEN.group_norm.default: torch.group_norm,
    _ATEN.layer_norm.default: torch.layer_norm,
    _ATEN.linear.default: functional.linear,
    _ATEN.log_softmax.int: torch.log_softmax,
    _ATEN.matmul.default: torch.matmul,
    _ATEN.max_pool2d.default: torch.max_pool2d,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.neg.default: torch.neg,
    _ATEN.permute.default: torch.permute,
    _ATEN.relu.default: torch.relu,
    _ATEN.reshape.default: torch.reshape,
    _ATEN.rsqrt.default: torch.rsqrt,
    _ATEN.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
    _ATEN.select.int: torch.select,
    _ATEN.sigmoid.default: torch.sigmoid,
    _ATEN.sin.default: torch.sin,
    _ATEN.softmax.int: torch.softmax,
    _ATEN.sub.Tensor: torch.sub,
    _ATEN.t.default: torch.t,
    _ATEN.tanh.default: torch.tanh,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.unbind.int: torch.unbind,
    _ATEN.unsqueeze.default: torch.unsqueeze,
    _ATEN.view.default: Tensor.view,
}
"""For each op a function of torch that calls the op, whatever the operands are."""

_KEYWORDS = frozenset(
    {"alpha", "approximate", "dtype", "enable_gqa", "memory_format", "scale"}
)
"""Arguments that ops and functions know by the same names."""


def with_bindings(gm: fx.GraphModule, left: Collection[str] = ()) -> fx.GraphModule:
    """A copy of `gm` that calls torch's functions; only its root graph does.

    Args:
        left: names of nodes that call their ops as in `gm`.
    """
    bound, _ = copied(gm)
    for node in bound.graph.nodes:
        if node.op != "call_function" or node.name in left:
            continue
        if node.target is _CAST:
            if list(node.kwargs) != ["dtype"] or len(node.args) != 1:
                continue
            read = node.args[0].meta.get("val")
            # `_to_copy` always copies; `Tensor.to` gives the operand itself where the
            # dtype is the same, and a later write would reach both.
            if isinstance(read, Tensor) and read.dtype != node.kwargs["dtype"]:
                node.target = Tensor.to
        # A keyword that torch's function does not know would raise at the first call.
        elif _KEYWORDS.issuperset(node.kwargs):
            node.target = BINDINGS.get(node.target, node.target)
    return bound
