"""The numbers a graph computes with that are known when it is captured.

`x * 1e-8`, `x * torch.tensor(1e-8)` and `x * x.new_full((), 1e-8)` mean the same: with
a Python number, with a tensor that the graph holds, with a tensor that the graph fills.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import argument
from autoamp.op_names import base_name
from autoamp.ops import is_pointwise, is_random, mutates
from autoamp.rules import family
from autoamp.trace.normalise import NUMBER

Known = Mapping[str, int | float]
"""Nodes whose tensors hold one number throughout, and the number."""

_FILLERS = {
    "aten::fill": "value",
    "aten::full": "fill_value",
    "aten::full_like": "fill_value",
    "aten::new_full": "fill_value",
    "aten::scalar_tensor": "s",
}
"""Ops whose result is one number throughout, and the argument that holds it."""


def known_numbers(gm: fx.GraphModule) -> Known:
    """The number that each node holds: attributes, the model's own tensors, fillings.

    The numbers in the caller's tensors are not known.  A tensor that is written to
    later is taken to hold its first number: at worst an op stays in fp32 for that
    number, which harms nothing.
    """
    known: dict[str, int | float] = {}
    for node in gm.graph.nodes:
        number = node.meta.get(NUMBER)
        if node.op == "get_attr":
            number = compat.held_number(operator.attrgetter(str(node.target))(gm))
        elif isinstance(node.target, compat.OpOverload):
            number = _made(node, known)
        if number is not None:
            known[node.name] = number
    return known


def numbers(node: fx.Node, known: Known) -> Iterator[int | float]:
    """The numbers among a call's arguments, in tensors or by themselves."""
    for value in (*node.args, *node.kwargs.values()):
        number = _number(value, known)
        if number is not None:
            yield number


def filling(node: fx.Node, known: Known) -> int | float | None:
    """The number that a call of a torch op fills a tensor with; None without one."""
    assert isinstance(node.target, compat.OpOverload)
    name = _FILLERS.get(base_name(node.target).removesuffix("_"))
    return _number(argument(node, name), known) if name is not None else None


def _number(value: object, known: Known) -> int | float | None:
    if isinstance(value, fx.Node):
        return known.get(value.name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None  # type: ignore[return-value]


def _made(node: fx.Node, known: Known) -> int | float | None:
    """The one number in the result of a torch op, if the operands determine it."""
    assert isinstance(node.target, compat.OpOverload)
    number = filling(node, known)
    operands = node.all_input_nodes
    if number is not None or not operands:
        return number
    if any(operand.name not in known for operand in operands):
        return None
    aliases = [r.alias_info for r in compat.schema(node.target).returns]
    views = any(alias is not None and not alias.is_write for alias in aliases)
    if views or base_name(node.target) in family("keeps_its_number"):
        return known[operands[0].name]
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    settled = not (mutates(node.target) or is_random(node.target))
    return _computed(node, known) if settled and is_pointwise(node.target) else None


def _computed(node: fx.Node, known: Known) -> float:
    """The number that a call makes of known numbers: `-torch.tensor(1e9)`."""

    def operand(leaf: fx.Node) -> Any:
        return torch.tensor(known[leaf.name], dtype=torch.float64, device="cpu")

    args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
    return float(node.target(*args, **kwargs))  # type: ignore[operator]
