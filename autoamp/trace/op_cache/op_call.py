"""One call of a captured graph as the ATen op it comes to."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.op_names import overloads
from autoamp.ops import aliasing_arguments, is_inplace, is_view, mutates

_ONE_OP = frozenset(
    {
        functional.batch_norm,
        functional.dropout,
        functional.group_norm,
        functional.layer_norm,
        functional.log_softmax,
        functional.relu,
        functional.silu,
        functional.softmax,
    }
)
"""Functions written in Python that call one op, the same for every shape."""


@functools.cache
def comes_to_one_op(target: Any) -> bool:
    """Whether each call of `target` comes to one op at most.

    For functions and methods that torch implements in C the argument parser chooses the
    op, by the types of the arguments alone.  Indexing is an exception: each index that
    does anything adds an op.
    """
    return target in _ONE_OP or bool(_ops_of(target))


@functools.cache
def same_op_for_all_shapes(target: Any) -> bool:
    """Whether calls of `target` come to the same op for operands of any shape.

    Views are left out, because the result of a view op may be the operand itself, a
    view of the operand or a copy.
    """
    found = _ops_of(target)
    return target in _ONE_OP or (bool(found) and not any(map(is_view, found)))


def _ops_of(target: Any) -> list[compat.OpOverload]:
    """The ops that a function or method of C may come to; empty for others."""
    if isinstance(target, compat.OpOverload):
        return [target]
    if isinstance(target, str):
        method = getattr(torch.Tensor, target, None)
        is_in_c = isinstance(method, types.MethodDescriptorType)
        return overloads(f"aten::{target}") if is_in_c else []
    if not isinstance(target, types.BuiltinFunctionType):
        return []
    name = target.__name__
    if target.__module__ == operator.add.__module__:
        name = _OPERATORS.get(name, name)
    return overloads(f"aten::{name}")


_OPERATORS = {
    **{f"i{name}": f"{name}_" for name in ("add", "sub", "mul", "pow")},
    "and_": "__and__",
    "floordiv": "floor_divide",
    "invert": "bitwise_not",
    "itruediv": "div_",
    "mod": "remainder",
    "or_": "__or__",
    "truediv": "div",
    "xor": "__xor__",
}
"""The ATen names of Python's operators where the two names differ."""


class OperandNumber(NamedTuple):
    """Stands for the operand of that number in the arguments of an `OpCall`."""

    number: int


class OpCall(NamedTuple):
    """One ATen op, and its arguments, in which operands are numbered.

    Attributes:
        target: None where the call does nothing (`x.contiguous()` of an `x` that is
            contiguous already).
        returned: the number of the operand that is also the result, because the op
            writes to the operand or the call returns the operand unchanged
            (`x.float()` of an fp32 tensor); else None.
        parts: the structure of the results of an op with several; else None.
    """

    target: compat.OpOverload | None
    args: Any
    kwargs: Any
    returned: int | None
    parts: pytree.TreeSpec | None = None


class Call(NamedTuple):
    """A call about to be made.

    Attributes:
        key: equal for calls that come to the same op.
        operands: the tensors that the call reads, each once, in order.
        nodes: the nodes of the operands in the trace, before the call is made.
    """

    key: Hashable
    operands: Sequence[torch.Tensor]
    nodes: Sequence[fx.Node]


def recorded(op_call: OpCall, call: Call, like: fx.Node) -> fx.Node:
    """Records a call as the op it comes to, in the running trace; gives its node."""
    args, kwargs = _mapped(
        (op_call.args, op_call.kwargs),
        lambda v: call.nodes[v.number] if isinstance(v, OperandNumber) else v,
    )
    return compat.record_op(op_call.target, args, kwargs, like)


def op_call_of(call: Call, heard: compat.Heard, result: Any) -> OpCall | None:
    """The op that a call came to, as `heard`; None if the call is not simple.

    In a simple call the op reads operands of the call and nothing else, and writes to
    one of them at most, which is then the result.

    Args:
        result: Dynamo's result of the call.
    """
    target, args, kwargs = heard
    same = [i for i, operand in enumerate(call.operands) if operand is result]
    parts = None
    if isinstance(result, list | tuple):
        parts = _parts(target, result)
        if parts is None or target is None or mutates(target):
            return None
    elif target is not None and is_inplace(target):
        if not same:
            return None
    elif target is not None and mutates(target) and _may_give(target, same):
        return None
    numbers = {id(each): OperandNumber(i) for i, each in enumerate(call.operands)}
    try:
        args, kwargs = _mapped(
            (args, kwargs),
            lambda v: numbers[id(v)] if isinstance(v, torch.Tensor) else v,
        )
    except KeyError:  # a tensor that is no operand of the call
        return None
    return OpCall(target, args, kwargs, same[0] if same else None, parts)


def _may_give(target: compat.OpOverload, same: Sequence[int]) -> bool:
    """Whether the result of an op is, or shares memory with, an operand."""
    return bool(same) or bool(aliasing_arguments(target))


def _parts(
    target: compat.OpOverload | None, results: Sequence[Any]
) -> pytree.TreeSpec | None:
    """The structure in which an op returns `results`; None if they are no tensors."""
    if target is None or not results:
        return None
    if not all(isinstance(result, torch.Tensor) for result in results):
        return None
    several = len(compat.schema(target).returns) > 1
    return pytree.tree_structure((tuple if several else list)(results))


def node_of(result: Any) -> fx.Node | None:
    """The node of the trace that a tensor stands for; None for anything else."""
    proxy = compat.recorded_proxy(result) if isinstance(result, torch.Tensor) else None
    return None if proxy is None else compat.proxy_node(proxy)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with each leaf replaced by `function` of the leaf."""
    if isinstance(value, OperandNumber):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(v, function) for v in value)
    if isinstance(value, dict):
        return {k: _mapped(v, function) for k, v in value.items()}
    return function(value)
