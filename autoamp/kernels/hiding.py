"""Recognises masks: calls that make scores so small that their softmax is 0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.kernels.chains import sizes_of
from autoamp.kernels.masks import computed, made_from_sizes
from autoamp.op_names import base_name

_ADDED = -1e4
"""The largest number that hides a key it is added to: `exp(-1e4)` is 0 in fp32, and no
rounding to 16 bits makes a shown key of it."""

_FILLED = -1e9
"""The largest number that hides a key whose score it replaces.  Added to a score, as
attention kernels do, it gives the same number: half its last place in fp32 is 32."""

_PASSES_ON = frozenset(
    f"aten::{name}"
    for name in (
        *("_to_copy", "alias", "clone", "contiguous", "expand", "expand_as", "permute"),
        *("reshape", "select", "slice", "squeeze", "to", "transpose", "tril", "triu"),
        *("type_as", "unsqueeze", "view"),
    )
)
"""Ops whose result holds numbers of their first operand, and zeros."""


@dataclass(frozen=True)
class Hidden:
    """A call that hides keys from queries.

    Attributes:
        scores: the scores it is applied to.
        mask: a mask that broadcasts against the scores: bool, or numbers to add.
        value: the number that hidden scores become; None where `mask` is added.
        keeps: whether True in `mask` means that a score is kept.
    """

    scores: fx.Node
    mask: fx.Node
    value: float | None = None
    keeps: bool = False

    @property
    def is_total(self) -> bool:
        """Whether hidden scores become minus infinity, whatever they are scaled by."""
        return self.value == -math.inf


def hides(node: fx.Node) -> Hidden | None:
    """How a call hides keys; None where it does something else to the scores."""
    found = _hidden(node)
    if found is None or not isinstance(found.scores, fx.Node):
        return None
    before, after = found.scores.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    alike = before.dtype == after.dtype and sizes_of(before) == sizes_of(after)
    return found if alike else None


def _hidden(node: fx.Node) -> Hidden | None:
    name, args = _name(node).removesuffix("_"), node.args
    if name == "aten::add" and len(args) == 2 and not node.kwargs:
        one, other = args
        if isinstance(other, fx.Node) and _is_mask(other):
            return Hidden(one, other)  # type: ignore[arg-type]
        if isinstance(one, fx.Node) and _is_mask(one) and name == _name(node):
            return Hidden(other, one)  # type: ignore[arg-type]
    elif name == "aten::masked_fill":
        value = number_of(args[2])
        if value is not None and value <= _FILLED:
            return Hidden(args[0], args[1], value)  # type: ignore[arg-type]
    elif name == "aten::where" and len(args) == 3:
        for scores, filled, keeps in ((1, 2, True), (2, 1, False)):
            value = number_of(args[filled])
            if value is not None and value <= _FILLED:
                return Hidden(args[scores], args[0], value, keeps)  # type: ignore[arg-type]
    return None


def number_of(value: Any) -> float | None:
    """The number that an argument is, also where calls make a 0-dim tensor of it."""
    if isinstance(value, fx.Node):
        known = value.meta.get("val")
        if not isinstance(known, Tensor) or known.dim():
            return None
        found = _made(value)
        return None if found is None else float(found)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _made(node: fx.Node) -> Tensor | None:
    """The tensor that calls make of sizes and numbers alone."""
    calls = made_from_sizes(node)
    if calls is None:
        return None
    with compat.on_real_numbers():
        try:
            return computed(calls)
        except Exception:  # noqa: BLE001 - then the calls stay as they are
            return None


def _is_mask(node: fx.Node) -> bool:
    """Whether each number of a tensor is 0, or so small that adding it hides a key."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.requires_grad:
        return False
    if value.dtype == torch.bool or not value.is_floating_point():
        return False
    name, args = _name(node), node.args
    if name in _PASSES_ON:
        return isinstance(args[0], fx.Node) and _is_mask(args[0])
    if name == "aten::add" and not node.kwargs:
        return all(isinstance(n, fx.Node) and _is_mask(n) for n in args[:2])
    if name == "aten::mul":
        return _is_whole(args[0]) and _hides(args[1])
    if name == "aten::masked_fill":
        rest = _is_small(args[0]) or _is_truth_of(args[1], args[0])
        return rest and _hides(args[2])
    if name == "aten::where" and len(args) == 3:
        return _is_small(args[1]) and _is_small(args[2])
    found = _made(node)
    return found is not None and bool(((found == 0) | (found <= _ADDED)).all())


def _is_truth_of(truth: Any, node: Any) -> bool:
    """Whether `truth` is True just where `node` is not 0, as `node.to(torch.bool)`."""
    is_cast = isinstance(truth, fx.Node) and _name(truth) in (
        "aten::to",
        "aten::_to_copy",
    )
    return is_cast and truth.args[0] is node


def _hides(argument: Any) -> bool:
    number = number_of(argument)
    return number is not None and number <= _ADDED


def _is_small(argument: Any) -> bool:
    """Whether an argument is 0 everywhere, or as small as a mask's numbers are."""
    number = number_of(argument)
    if number is not None:
        return number == 0 or number <= _ADDED
    return isinstance(argument, fx.Node) and _is_mask(argument)


def _is_whole(node: Any) -> bool:
    """Whether all numbers are whole, as in 1 minus a mask of zeros and ones."""
    if isinstance(node, (int, float)):
        return float(node).is_integer()
    value = node.meta.get("val")
    if isinstance(value, Tensor) and not value.is_floating_point():
        return not value.is_complex()
    name = _name(node)
    if name in _PASSES_ON:
        return isinstance(node.args[0], fx.Node) and _is_whole(node.args[0])
    if name in ("aten::rsub", "aten::sub", "aten::add") and not node.kwargs:
        return all(_is_whole(each) for each in node.args[:2])
    return False


def _name(node: fx.Node) -> str:
    is_op = isinstance(node.target, compat.OpOverload)
    return base_name(node.target) if is_op else ""  # type: ignore[arg-type]
