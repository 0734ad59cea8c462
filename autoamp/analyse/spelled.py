"""One call of a captured graph as the ATen op it comes to: learned, and made again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.ops import aliasing_arguments, is_inplace, mutates


class Place(NamedTuple):
    """In the arguments of a spelling: the operand of that number."""

    number: int


class Spelling(NamedTuple):
    """One ATen op, and its arguments, in which operands are numbered.

    Attributes:
        target: None where the call does nothing (`x.contiguous()` of what is).
        returned: the operand that Dynamo has for the result, or None: the one written
            to, or left as it is (`x.float()` of an fp32 tensor).
        parts: how the results lie in the value of an op that has several; else None.
    """

    target: compat.OpOverload | None
    args: Any
    kwargs: Any
    returned: int | None
    parts: pytree.TreeSpec | None = None


class Call(NamedTuple):
    """A call about to be made.

    Attributes:
        key: equal for calls that are spelled alike.
        operands: the tensors it reads, each once, in order.
        nodes: what they are in the trace before it.
    """

    key: Hashable
    operands: Sequence[torch.Tensor]
    nodes: Sequence[fx.Node]


def recorded(spelling: Spelling, call: Call, like: fx.Node) -> fx.Node:
    """The node of a call that is spelled so, in the trace that is running."""
    args, kwargs = _mapped(
        (spelling.args, spelling.kwargs),
        lambda v: call.nodes[v.number] if isinstance(v, Place) else v,
    )
    return compat.record_op(spelling.target, args, kwargs, like)


def spelling_of(
    call: Call, made: Sequence[fx.Node], result: Any, example: Any
) -> Spelling | None:
    """How a call is spelled that was traced to the nodes `made`; None if not simply.

    Simply: one op at most, of the operands of the call, whose results are those of the
    call.

    Args:
        example: what Dynamo has for the result.
    """
    if not made:
        return _nothing_done(call, result, example)
    node, *elements = made
    target = node.target
    if not isinstance(target, compat.OpOverload):
        return None
    parts = None
    same: list[int] = []
    if isinstance(result, list | tuple):
        parts = _parts(node, elements, result)
        if parts is None or mutates(target):
            return None
    elif elements or node_of(result) is not node:
        return None
    else:
        same = [i for i, operand in enumerate(call.operands) if operand is example]
        if is_inplace(target):
            if not (same and result is example):
                return None
        elif mutates(target) and (same or aliasing_arguments(target)):
            return None
    places = {each: Place(i) for i, each in enumerate(call.nodes)}
    if not places.keys() >= set(node.all_input_nodes):
        return None
    args, kwargs = _mapped(
        (node.args, node.kwargs),
        lambda v: places[v] if isinstance(v, fx.Node) else v,
    )
    return Spelling(target, args, kwargs, same[0] if same else None, parts)


def _nothing_done(call: Call, result: Any, example: Any) -> Spelling | None:
    """The spelling of a call that gives one of its operands, which Dynamo has too."""
    for place, operand in enumerate(call.operands):
        if result is operand and result is example:
            return Spelling(None, (), {}, place)
    return None


def _parts(
    node: fx.Node, elements: Sequence[fx.Node], results: Sequence[Any]
) -> pytree.TreeSpec | None:
    """How `results` lie in the value of `node`, of whose `elements` they are all."""
    if [node_of(result) for result in results] != elements or not elements:
        return None
    if whole_of(elements) is not node:
        return None
    return pytree.tree_structure(node.meta["val"])


def whole_of(parts: Sequence[fx.Node | None]) -> fx.Node | None:
    """The node of which `parts` are all the elements, in order; None if of none."""
    first = parts[0] if parts else None
    whole: Any = first.args[0] if first is not None and first.args else None
    wanted = [(operator.getitem, (whole, place)) for place in range(len(parts))]
    if [part and (part.target, part.args) for part in parts] != wanted:
        return None
    values = pytree.tree_leaves(whole.meta.get("val"))
    return whole if len(values) == len(parts) else None


def node_of(result: Any) -> fx.Node | None:
    """The node of the trace that a tensor stands for; None for anything else."""
    proxy = compat.recorded_proxy(result) if isinstance(result, torch.Tensor) else None
    return None if proxy is None else compat.proxy_node(proxy)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` of each leaf in place of it."""
    if isinstance(value, Place):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(v, function) for v in value)
    if isinstance(value, dict):
        return {k: _mapped(v, function) for k, v in value.items()}
    return function(value)
