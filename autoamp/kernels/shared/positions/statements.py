"""Statements about the positions of a tensor, which hold for all sizes.

A mask such as `arange(n)[None] <= arange(n)[:, None]` is read as a statement about
positions, `j - i <= 0`, that holds for every size the graph may run with: no element of
the mask is looked at.  Positions are counted by dimension from the last (-1), so that
broadcasting changes none.  A dimension of size 1 has one position, 0, which takes no
part in a statement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoamp import compat

Size = Any
"""An int, or the expression of a symbolic size."""


@dataclass(frozen=True)
class Whole:
    """A whole number: a sum of positions with factors, and a number.

    Attributes:
        factors: (dimension, factor) by dimension, without factors of 0.
        number: the number that is added.
    """

    factors: tuple[tuple[int, int], ...]
    number: Size

    def plus(self, other: Whole, times: int = 1) -> Whole:
        """The sum of this and `times` the other."""
        total = dict(self.factors)
        for dimension, factor in other.factors:
            total[dimension] = total.get(dimension, 0) + times * factor
        left = tuple(sorted((d, f) for d, f in total.items() if f))
        return Whole(left, self.number + times * other.number)

    def moved(
        self, to: Callable[[int], int | None], shift: Mapping[int, Size]
    ) -> Whole:
        """With dimension d called `to(d)`, None where only position 0 is left.

        Args:
            shift: the number that is first added to the position of a dimension.
        """
        number, left = self.number, []
        for dimension, factor in self.factors:
            number = number + factor * shift.get(dimension, 0)
            new = to(dimension)
            if new is not None:
                left.append((new, factor))
        return Whole(tuple(sorted(left)), number)


@dataclass(frozen=True)
class AtMostZero:
    """That a whole number is 0 or less."""

    whole: Whole


@dataclass(frozen=True)
class Every:
    """That all of several statements hold; without any, a statement that holds."""

    parts: frozenset[Statement]


@dataclass(frozen=True)
class Some:
    """That one of several statements holds; without any, one that does not hold."""

    parts: frozenset[Statement]


Statement = AtMostZero | Every | Some
HOLDS, FAILS = Every(frozenset()), Some(frozenset())


@dataclass(frozen=True)
class Choice:
    """One number where a statement holds, another one where it does not."""

    where: Statement
    number: float
    otherwise: float


Element = Whole | float | Choice | AtMostZero | Every | Some
"""What a tensor holds at each position: numbers, or bools as a statement."""


def opposite(statement: Statement) -> Statement:
    """The statement that holds where `statement` does not."""
    if isinstance(statement, AtMostZero):
        one = Whole((), 1)
        return AtMostZero(one.plus(statement.whole, -1))
    other = Some if isinstance(statement, Every) else Every
    return other(frozenset(map(opposite, statement.parts)))


def both(one: Statement, other: Statement) -> Statement:
    """The statement that both hold."""
    return Every(frozenset({one, other}))


def either(one: Statement, other: Statement) -> Statement:
    """The statement that one of the two holds."""
    return Some(frozenset({one, other}))


def simplified(statement: Statement, sizes: Sequence[Size]) -> Statement:
    """The statement without the parts that hold, or fail, at all positions."""
    if isinstance(statement, AtMostZero):
        least, most = _bounds(statement.whole, sizes)
        if most is not None and most <= 0:
            return HOLDS
        return FAILS if least is not None and least > 0 else statement
    kind = type(statement)
    nothing, all_of_it = (HOLDS, FAILS) if kind is Every else (FAILS, HOLDS)
    parts = {simplified(part, sizes) for part in statement.parts} - {nothing}
    if all_of_it in parts:
        return all_of_it
    return parts.pop() if len(parts) == 1 else kind(frozenset(parts))


def _bounds(whole: Whole, sizes: Sequence[Size]) -> tuple[int | None, int | None]:
    """The least and the largest value of a whole number; None where sizes decide."""
    least = most = whole.number
    for dimension, factor in whole.factors:
        reach = factor * (sizes[dimension] - 1)
        least, most = (least, most + reach) if factor > 0 else (least + reach, most)
    return _plain(least), _plain(most)


MOST = 2**20
"""The largest size taken for one that is a symbol: a mask of as many queries and keys
would be a terabyte."""


def span(whole: Whole, sizes: Sequence[Size]) -> tuple[int | None, int | None]:
    """The least and the largest value of a whole number, None where one is unknown."""
    reach = [size if isinstance(size, int) else MOST for size in sizes]
    least, most = compat.bounds(whole.number, MOST)
    moves = [factor * max(reach[d] - 1, 0) for d, factor in whole.factors]
    if least is None or most is None:
        return None, None
    return least + sum(min(m, 0) for m in moves), most + sum(max(m, 0) for m in moves)


def _plain(number: Size) -> int | None:
    if isinstance(number, int):
        return number
    return int(number) if getattr(number, "is_Integer", False) else None


def chosen(where: Statement, one: bool, other: bool) -> Statement:
    """The statement that is `one` where a statement holds, and `other` elsewhere."""
    if one == other:
        return HOLDS if one else FAILS
    return where if one else opposite(where)


def is_zero(whole: Whole) -> Statement:
    """That a whole number is 0."""
    less = Whole((), 0).plus(whole, -1)
    return both(AtMostZero(whole), AtMostZero(less))
