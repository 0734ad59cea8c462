"""The elements of tensors made of sizes and numbers, and how ops change these elements.

An element is a number, a whole number that depends on the position, one of two numbers,
or a statement for bools (`statements.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoamp.kernels.shared.positions.statements import (
    FAILS,
    HOLDS,
    AtMostZero,
    Choice,
    Element,
    Every,
    Size,
    Some,
    Statement,
    Whole,
    both,
    chosen,
    is_zero,
    opposite,
    span,
)


class UnknownError(Exception):
    """A tensor holds elements that no statement here describes."""


def in_dtype(found: Element, dtype: torch.dtype, sizes: Sequence[Size]) -> Element:
    """The element of a tensor of some sizes after a cast to `dtype`.

    Raises:
        UnknownError: some number is not the same in `dtype`, or may not be.
    """
    if dtype == torch.bool:
        if isinstance(found, Choice):
            return chosen(found.where, bool(found.number), bool(found.otherwise))
        if isinstance(found, float):
            return HOLDS if found else FAILS
        return opposite(is_zero(found)) if isinstance(found, Whole) else found
    if isinstance(found, (AtMostZero, Every, Some)):
        return Choice(found, 1.0, 0.0)
    if isinstance(found, Choice):
        return Choice(
            found.where, *(_cast(v, dtype) for v in (found.number, found.otherwise))
        )
    if isinstance(found, float):
        return _cast(found, dtype)
    if not _holds(dtype, *span(found, sizes)):
        raise UnknownError
    return found


def _cast(number: float, dtype: torch.dtype) -> float:
    held_by = () if dtype.is_floating_point else (dtype, torch.float64)
    if not all(_holds(each, number, number) for each in held_by):
        raise UnknownError
    return float(torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype))


def _holds(dtype: torch.dtype, least: float | None, most: float | None) -> bool:
    """Whether all whole numbers from one to another are themselves in `dtype`."""
    if least is None or most is None or dtype.is_complex:
        return False
    if dtype.is_floating_point:
        end = round(2 / torch.finfo(dtype).eps)
        return -end <= least and most <= end
    info = torch.iinfo(dtype)
    return info.min <= least and most <= info.max


def shown(
    found: Element,
    rank: int,
    order: Sequence[int | None],
    shift: Mapping[int, Size] | None = None,
) -> Element:
    """What a view holds.

    Args:
        rank: the dimensions of the tensor that is viewed.
        order: for each dimension of the view the dimension it shows; None for a
            dimension along which all is alike.
        shift: by dimension of the tensor, the number that is added to the position.
    """
    places = {d - rank: at - len(order) for at, d in enumerate(order) if d is not None}
    moved = {d - rank: by for d, by in (shift or {}).items()}
    held: Element = _with_wholes(found, lambda number: number.moved(places.get, moved))
    return held


def replaced(found: Element, by: Mapping[int, Whole]) -> Element:
    """What is found, at positions that are whole numbers by dimension."""

    def whole(number: Whole) -> Whole:
        total = Whole((), number.number)
        for dimension, factor in number.factors:
            total = total.plus(by[dimension], factor)
        return total

    held: Element = _with_wholes(found, whole)
    return held


def _with_wholes(found: Any, whole: Callable[[Whole], Whole]) -> Any:
    """What is found, with other whole numbers in the place of its own."""
    if isinstance(found, AtMostZero):
        return AtMostZero(whole(found.whole))
    if isinstance(found, (Every, Some)):
        return type(found)(frozenset(_with_wholes(p, whole) for p in found.parts))
    if isinstance(found, Choice):
        where = _with_wholes(found.where, whole)
        return Choice(where, found.number, found.otherwise)
    return whole(found) if isinstance(found, Whole) else found


def only(found: Element, inside: Statement) -> Element:
    """What is found where a statement holds, and 0 elsewhere."""
    if isinstance(found, (AtMostZero, Every, Some)):
        return both(found, inside)
    return parted(inside, found, 0.0)


def parted(where: Statement, one: Element, other: Element) -> Element:
    """One element where a statement holds, and the other one elsewhere."""
    if isinstance(one, Choice) and isinstance(other, float):
        if one.otherwise == other:
            return Choice(both(one.where, where), one.number, other)
        if one.number == other:
            hidden = both(opposite(one.where), where)
            return Choice(hidden, one.otherwise, other)
    if isinstance(one, float) and isinstance(other, Choice):
        return parted(opposite(where), other, one)
    numbers = [plain(each) for each in (one, other)]
    return Choice(where, *numbers)


def plain(found: Element) -> float:
    """The number that a tensor holds everywhere."""
    if isinstance(found, Whole) and not found.factors and isinstance(found.number, int):
        return _cast(found.number, torch.int64)
    if not isinstance(found, float):
        raise UnknownError
    return found


def result(how: Any, one: Element, other: Element) -> Element:
    """What a sum, difference, product, quotient or comparison of two tensors holds."""
    if isinstance(one, Whole) and isinstance(other, Whole):
        if how in (operator.add, operator.sub):
            return one.plus(other, 1 if how is operator.add else -1)
        if how is operator.mul and not (one.factors and other.factors):
            whole, times = (one, other) if one.factors else (other, one)
            if isinstance(times.number, int):
                return Whole((), 0).plus(whole, times.number)
        raise UnknownError
    if isinstance(one, Choice) and isinstance(other, Choice):
        if one.where != other.where:
            raise UnknownError
        pairs = ((one.number, other.number), (one.otherwise, other.otherwise))
        return Choice(one.where, *(how(a, b) for a, b in pairs))
    if isinstance(one, Choice):
        number = plain(other)
        return Choice(one.where, how(one.number, number), how(one.otherwise, number))
    if isinstance(other, Choice):
        number = plain(one)
        return Choice(
            other.where, how(number, other.number), how(number, other.otherwise)
        )
    return float(how(plain(one), plain(other)))


def comparison(how: Any, difference: Whole) -> Statement:
    """What a comparison of two whole numbers says of their difference."""
    one, less = Whole((), 1), Whole((), 0).plus(difference, -1)
    return {
        operator.le: AtMostZero(difference),
        operator.lt: AtMostZero(difference.plus(one)),
        operator.ge: AtMostZero(less),
        operator.gt: AtMostZero(less.plus(one)),
        operator.eq: is_zero(difference),
        operator.ne: opposite(is_zero(difference)),
    }[how]
