"""Reads a written number: as itself, or as the real number it is an approximation of.

A number of up to seven digits is the decimal that is written: 0.8 and 0.7978 are not
`sqrt(2 / pi)`.  A longer one, such as 0.7978845608, is a number that was cut off or
computed.  It stands for a simple real number where one lies so near that fp32 cannot
tell the two apart, and is its decimal otherwise.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

_MOST_EXACT = 7
"""A number of so many digits at most is meant exactly as it is written."""

_WRITTEN = 2
"""How far off a number is, in units of its last digit.  BLOOM's 0.1070322243 is a
multiple of `sqrt(2 / pi)` that was cut off, and then cut off itself."""

_COMPUTED = 4
"""How far off a number is, in units of the last place of a float, if Python computed
it: `math.sqrt(2 / math.pi) * 0.044715` was rounded four times."""

_LOST = 2.0**-25
"""The share of a number that fp32 loses: half a unit in its last place."""

_SPARE = 4
"""The digits that have to speak for a simple number: by chance one in 10 000 does."""


class Number(NamedTuple):
    """The real number `rational * sqrt(square) * sqrt(2 / pi)**of_pi`."""

    rational: Fraction
    square: Fraction = Fraction(1)
    of_pi: int = 0


_ROOT_2 = Fraction(2)
_FACTORS = (
    (1.0, Fraction(1), 0),
    (math.sqrt(2 / math.pi), Fraction(1), 1),
    (2 / math.sqrt(math.pi), _ROOT_2, 1),
    (math.sqrt(math.pi / 2), Fraction(1), -1),
    (math.sqrt(math.pi), _ROOT_2, -1),
)
"""What a simple rational number may be multiplied by: value, `square`, `of_pi`."""


@lru_cache(maxsize=1024)
def read(value: float) -> Number:
    """The real number that a written number stands for.

    >>> read(0.25).rational, read(0.7978845608).of_pi, read(0.7978).of_pi
    (Fraction(1, 4), 1, 0)
    >>> read(0.7071067811865475).square
    Fraction(1, 2)
    """
    exact = Fraction(repr(value))
    _, figures, exponent = Decimal(repr(value)).normalize().as_tuple()
    if len(figures) <= _MOST_EXACT:
        return Number(exact)
    assert isinstance(exponent, int)  # infinities are not read
    off = max(_WRITTEN * 10.0**exponent, _COMPUTED * math.ulp(value))
    off = min(off, _LOST * abs(value))
    known = len(figures) - _SPARE
    for factor, square, of_pi in _FACTORS:
        for simple in _simple(value / factor, known):
            if abs(float(simple) * factor - value) <= off:
                return Number(simple, square, of_pi)
    for simple in _simple(value * value, known):
        if simple > 0 and abs(math.sqrt(simple) - abs(value)) <= off:
            return Number(Fraction(1 if value > 0 else -1), simple)
    return Number(exact)


def _simple(value: float, digits: int) -> tuple[Fraction, Fraction]:
    """The quotient of small numbers and the short decimal that are next to `value`."""
    quotient = Fraction(value).limit_denominator(10 ** (digits // 2))
    return quotient, Fraction(f"{value:.{min(digits, _MOST_EXACT) - 1}e}")
