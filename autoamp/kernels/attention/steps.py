"""Reads a call between the product of an attention and its softmax as a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.kernels.attention.function.scores import FILLS, Kind
from autoamp.kernels.shared.calls import name_of, sizes_of
from autoamp.kernels.shared.constants import number_of

_FLOATS = (HIGH_DTYPE, *LOW_DTYPES.values())

LARGEST_FILL = -1e4
"""The largest number that is filled in.  Scores filled with a larger one may well have
a weight, and the kernel would be run in vain."""


@dataclass(frozen=True)
class Written:
    """A step, as `function.scores.Step` is one, with a node for its tensor."""

    kind: Kind
    number: float = 0.0
    tensor: fx.Node | None = None


def fills(steps: Sequence[Written]) -> list[Written]:
    """The steps that fill in a number."""
    return [step for step in steps if step.kind in FILLS]


def step_of(
    node: fx.Node, trained: Collection[fx.Node]
) -> tuple[fx.Node, Written] | None:
    """The scores that a call reads, and the change that the call makes to them.

    Args:
        trained: the values that a gradient may flow through.
    """
    factor = _factor(node)
    if factor is not None:
        scaled = Written(Kind.SCALE, factor)
        return (node.args[0], scaled) if 0 < factor < math.inf else None  # type: ignore[return-value]
    found = _added(node, trained) or _filled(node)
    if found is None:
        return None
    before, after = found[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    alike = before.dtype == after.dtype and sizes_of(before) == sizes_of(after)
    return found if alike else None


def _added(
    node: fx.Node, trained: Collection[fx.Node]
) -> tuple[fx.Node, Written] | None:
    """A call that adds numbers which need no gradient to scores."""
    name, args = name_of(node), node.args
    if name.removesuffix("_") != "aten::add" or len(args) != 2 or node.kwargs:
        return None
    if not all(isinstance(n, fx.Node) for n in args):
        return None
    one, other = args
    turned = name == "aten::add" and (
        other in trained if one not in trained else _size(other) > _size(one)
    )
    scores, numbers = (other, one) if turned else (one, other)
    value = numbers.meta.get("val")  # type: ignore[union-attr]
    is_float = isinstance(value, torch.Tensor) and value.dtype in _FLOATS
    if not is_float or numbers in trained:
        return None
    return scores, Written(Kind.ADD, 0.0, numbers)  # type: ignore[return-value, arg-type]


def _size(node: Any) -> int:
    """How many dimensions of a tensor are not of size 1."""
    value = node.meta.get("val")
    is_tensor = isinstance(value, torch.Tensor)
    return sum(size != 1 for size in sizes_of(value)) if is_tensor else -1


def _filled(node: fx.Node) -> tuple[fx.Node, Written] | None:
    """A call that fills scores with one number where a mask says so."""
    name, args = name_of(node).removesuffix("_"), node.args
    if name == "aten::masked_fill":
        places = [(0, 1, 2, Kind.FILL)]
    elif name == "aten::where" and len(args) == 3:
        places = [(1, 0, 2, Kind.KEEP), (2, 0, 1, Kind.FILL)]
    else:
        return None
    for scores, mask, value, kind in places:
        number = number_of(args[value])
        if number is not None and all(
            isinstance(args[at], fx.Node) for at in (scores, mask)
        ):
            return args[scores], Written(kind, number, args[mask])  # type: ignore[return-value, arg-type]
    return None


def _factor(node: fx.Node) -> float | None:
    """The number by which a call multiplies its first operand."""
    name = name_of(node)
    if name not in ("aten::mul", "aten::mul_", "aten::div", "aten::div_"):
        return None
    if len(node.args) != 2 or node.kwargs:
        return None
    number = number_of(node.args[1])
    if number is None or not isinstance(node.args[0], fx.Node):
        return None
    if name.startswith("aten::mul"):
        return number
    return 1 / number if number else None
