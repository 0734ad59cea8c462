"""Graphs of a few nodes, written as lines of Python: `low = low(x); return low`.

A call is an op of torch, or one of `CALLS`: `low` casts to bf16 and `up` to fp32, and
`wide` gives fp32 whatever it reads.  The last name is returned, unless a line says so.
"""

from __future__ import annotations

import ast
import operator
from typing import Any

import torch
from torch import fx, nn

from autoamp import compat
from autoamp.passes.functions import low_weight, saturating_cast

ATEN = torch.ops.aten
LOW, HIGH = torch.bfloat16, torch.float32
CAST = ATEN._to_copy.default

CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "low": (CAST, (), {"dtype": LOW}),
    "half": (CAST, (), {"dtype": torch.float16}),
    "up": (CAST, (), {"dtype": HIGH}),
    "wide": (ATEN.sum.default, (), {"dtype": HIGH}),
    "saturating": (saturating_cast, (LOW,), {}),
    "use": (low_weight, (), {}),
    "off": (compat.SET_GRAD, (False,), {}),
    "on": (compat.SET_GRAD, (True,), {}),
    "item": (operator.getitem, (), {}),
    "cond": (torch.ops.higher_order.cond, (), {}),
    "gt": (ATEN.gt.Scalar, (), {}),
    **{name: (getattr(ATEN, name).Tensor, (), {}) for name in ("add", "add_")},
}


def zeros(**dtypes: torch.dtype) -> dict[str, Any]:
    return {name: torch.zeros(4, 6, dtype=dtype) for name, dtype in dtypes.items()}


def graph(
    text: str, given: dict[str, Any] | None = None, **attributes: Any
) -> fx.GraphModule:
    """A graph whose metadata is what running its calls on zeros gives.

    Args:
        given: the inputs; x and y by default, if the text reads y.
    """
    made, nodes = fx.Graph(), {}
    names = {"x": HIGH, "y": HIGH} if "y" in text.replace("copy", "") else {"x": HIGH}
    for name, value in (given or zeros(**names)).items():
        nodes[name] = made.placeholder(name)
        nodes[name].meta["val"] = value
    for name in attributes:
        nodes[name] = made.create_node("get_attr", name, name=name)
    returned: Any = None
    for line in ast.parse(text.replace("return ", "returned = ")).body:
        assert isinstance(line, ast.Assign)
        (target,) = line.targets
        assert isinstance(target, ast.Name)
        if target.id == "returned":
            value = line.value
            names_of = value.elts if isinstance(value, ast.Tuple) else [value]
            returned = [_read(each, nodes) for each in names_of]
        else:
            nodes[target.id] = last = _call(made, target.id, line.value, nodes)
    made.output(returned or [last])
    root = nn.Module()
    for name, value in attributes.items():
        setattr(root, name, value)
    return fx.GraphModule(root, made)


def _call(made: fx.Graph, name: str, call: Any, nodes: dict[str, Any]) -> fx.Node:
    op = call.func.id
    target, more, kwargs = CALLS.get(op) or (getattr(ATEN, op).default, (), {})
    args = (*(_read(each, nodes) for each in call.args), *more)
    kwargs = {**kwargs, **{k.arg: _read(k.value, nodes) for k in call.keywords}}
    node = made.create_node("call_function", target, args, kwargs, name)
    node.meta["val"] = _value(node)
    return node


def _read(given: ast.expr, nodes: dict[str, Any]) -> Any:
    if isinstance(given, ast.Name):
        return nodes[given.id]
    if isinstance(given, ast.List):
        return [_read(each, nodes) for each in given.elts]
    return ast.literal_eval(given)


def _value(node: fx.Node) -> Any:
    if node.target in compat.MODE_CHANGES:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    if isinstance(node.target, compat.HigherOrderOperator):
        return args[-1]
    with torch.no_grad():
        return node.target(*args, **kwargs)
