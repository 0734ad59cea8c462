"""Finds the calls that compute with numbers beyond the low dtype's range."""

from __future__ import annotations

import math

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.numbers import Known, filling, numbers
from autoamp.dtypes import largest, short_name, smallest
from autoamp.op_names import base_name
from autoamp.ops import is_pointwise
from autoamp.rules import Category, family


def scales(target: compat.OpOverload, category: Category) -> bool:
    """Whether an op does arithmetic with its numbers: none is a limit or a filling."""
    limits = base_name(target).rstrip("_") in family("limits_or_fills")
    return is_pointwise(target) and not (limits or category is Category.CLEAR)


def literal_reason(
    node: fx.Node, low: torch.dtype, known: Known, category: Category
) -> str | None:
    """Why arithmetic with a number beyond the range of `low` must stay fp32, or None.

    A limit or a filling may be cut off at the range; a factor or a divisor may not.
    No number may become zero: `functional.normalize` divides by a norm that it keeps
    above 1e-12.

    Args:
        known: the numbers that tensors hold.
        category: the category of the op; clear ops do no arithmetic.
    """
    target = node.target
    assert isinstance(target, compat.OpOverload)
    filled = filling(node, known)
    if filled is None and not is_pointwise(target):
        return None
    for value in numbers(node, known) if filled is None else (filled,):
        if not math.isfinite(value):
            continue
        if 0 < abs(value) <= smallest(low) / 2:
            return f"computes with {value:g}, which {short_name(low)} rounds to zero"
        if abs(value) > largest(low) and filled is None and scales(target, category):
            return f"computes with {value:g}, which is beyond {short_name(low)}'s range"
    return None


def cut_off(node: fx.Node, low: torch.dtype, known: Known) -> bool:
    """Whether a call fills a tensor with a number beyond the range of `low`.

    In `low` the number is cut off: a mask can use the new number, a divisor cannot.
    """
    filled = filling(node, known)
    return filled is not None and largest(low) < abs(filled) < math.inf
