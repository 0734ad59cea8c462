"""Recognises graphs that update weights, which are not part of a model's forward.

A script may compile its optimizer's step, or a part of it (Muon's orthogonalisation,
the update of an averaged model).  Such code computes in fp32 for the sake of the
weights, and the script chose its dtypes.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoamp import compat

_WRITES = {
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ipow,
    operator.imatmul,
}


def updates_weights(gm: fx.GraphModule) -> bool:
    """Whether a graph that is being captured updates weights.

    A graph updates weights if it writes to a parameter, or if it is captured inside an
    optimizer's step without gradients recorded.  (A closure that an optimizer calls
    records gradients: it computes a loss.)
    """
    return _writes_to_weights(gm) or (
        not torch.is_grad_enabled() and _in_a_step_of_an_optimizer()
    )


def _writes_to_weights(gm: fx.GraphModule) -> bool:
    weights = {
        compat.storage_id(value)
        for node in gm.graph.nodes
        if node.op in {"placeholder", "get_attr"}
        and isinstance(value := _value(node), torch.Tensor)
        and (isinstance(value, nn.Parameter) or (value.is_leaf and value.requires_grad))
    }
    return bool(weights) and any(
        compat.storage_id(value) in weights
        for node in gm.graph.nodes
        for written in _written(node)
        if isinstance(value := _value(written), torch.Tensor)
    )


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose values a call writes to."""
    held: list[Any] = [node.kwargs.get("out")]
    if isinstance(node.target, torch._ops.OpOverload):
        arguments = compat.schema(node.target).arguments
        for position, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[position : position + 1]
                held.append(given or node.kwargs.get(argument.name))
    elif _writes_in_place(node):
        held.append(node.args[:1] or node.kwargs.get("self"))
    return (each for each in pytree.tree_leaves(held) if isinstance(each, fx.Node))


def _writes_in_place(node: fx.Node) -> bool:
    """Whether a call writes in place: `+=`, or a name that ends with `_` (`add_`)."""
    if node.op == "call_function" and node.target in _WRITES:
        return True
    name = node.target if node.op == "call_method" else _name_of(node.target)
    return isinstance(name, str) and name.endswith("_") and not name.endswith("__")


def _name_of(function: Any) -> Any:
    return getattr(function, "__name__", "")


def _value(node: fx.Node) -> Any:
    """The stand-in that Dynamo has computed for a node's value, or None."""
    return node.meta.get("example_value")


def _in_a_step_of_an_optimizer() -> bool:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False
