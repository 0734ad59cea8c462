"""Functions as quotients of polynomials, so that equal ones are found to be equal.

A `Form` is a numerator and a denominator.  Each is a sum of products of *atoms*: the
data, a vector, the exponential of a product, the sum over a row of a product, a root.
Coefficients and exponents are exact fractions.  The rules that are applied hold for all
real numbers, such as `exp(a + b) = exp(a) exp(b)`, and `a / b = c / d` is decided as
`a d - c b = 0`, multiplied out: two forms that are found equal are equal.  A function
that the rules do not reach raises `UnknownError`, and so does a form that grows too
large.

This is not sympy's job: sympy has no sums over the rows of a tensor, its `simplify`
tries heuristics for seconds, and importing it costs the first call.

A written number of up to seven digits is the decimal that is written: 0.8 and 0.7978
are not `sqrt(2 / pi)`.  A longer one, such as 0.7978845608, was cut off or computed.
It stands for a simple real number where one lies so near that fp32 cannot tell the two
apart, and is its decimal otherwise (`read`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
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
"""The factors of a simple rational number: value, `square`, `of_pi`."""


@lru_cache(maxsize=1024)
def read(value: float) -> Number:
    """The real number that a written number stands for.

    >>> read(0.25).rational, read(0.7978845608).of_pi, read(0.7978).of_pi
    (Fraction(1, 4), 1, 0)
    >>> read(0.7071067811865475).square
    Fraction(1, 2)
    """
    # By `repr`: the decimal that was written, and not the binary fraction beside it.
    exact = Fraction(repr(value))
    _, figures, exponent = Decimal(repr(value)).normalize().as_tuple()
    if len(figures) <= _MOST_EXACT:
        return Number(exact)
    assert isinstance(exponent, int)  # infinities are not read
    off = max(_WRITTEN * 10.0**exponent, _COMPUTED * math.ulp(value))
    # The kernel computes in fp32: what fp32 can tell apart is another constant.
    off = min(off, _LOST * abs(value))
    # A number of as many digits as the value would fit any value.
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


Product = tuple[tuple[int, Fraction], ...]
"""Atoms, by their numbers, and their exponents; in the order of the numbers."""

Sum = Mapping[Product, Fraction]
"""Products and their coefficients, none of which is 0."""

_MOST_TERMS = 400
_MOST_POWER = 8
_MOST_FACTOR = 10_000

_ONE: Sum = {(): Fraction(1)}


class UnknownError(Exception):
    """A value is no sum of products of the atoms that are known here."""


class Atom(NamedTuple):
    """A factor of a product.

    Attributes:
        kind: "letter", "exp", "log", "erf", "root", "prime" (its root), "sum", "max".
        of: the letter, the prime, the `Product` ("exp", "sum") or the terms of a `Sum`.
        varies: whether the atom differs within a row.
        positive: whether the atom is known to be more than 0.
    """

    kind: str
    of: Hashable
    varies: bool = False
    positive: bool = False


class Algebra:
    """The atoms of one proof, numbered, and the results of their products."""

    def __init__(self, size: int) -> None:
        """`size` is the number of elements of a row; 0 where there are no rows."""
        self.size = size
        self.atoms: list[Atom] = []
        self._numbers: dict[tuple[str, Hashable], int] = {}

    def letter(self, name: str) -> Form:
        """An unknown that varies within a row: the data, a vector, a gradient."""
        return self.form(self.atom("letter", name, varies=True))

    def number(self, value: float | Fraction) -> Form:
        """The real number that a written number stands for."""
        # An int is exact however many digits it has.
        if isinstance(value, int | Fraction):
            return Form(self, {(): Fraction(value)} if value else {})
        if not abs(value) < float("inf"):
            raise UnknownError
        found = read(value)
        result = self.number(found.rational) * self.root_of(found.square)
        if found.of_pi:
            atom = self.atom("letter", "sqrt(2/pi)", positive=True)
            result *= self.form(atom, Fraction(found.of_pi))
        return result

    def root_of(self, value: Fraction) -> Form:
        """The root of a positive number, by roots of primes."""
        # sqrt(n / d) is sqrt(n * d) / d: roots of whole numbers only.
        rest, whole, product = value.numerator * value.denominator, 1, self.number(1)
        factor = 2
        while factor * factor <= rest and factor < _MOST_FACTOR:
            while rest % (factor * factor) == 0:
                rest, whole = rest // (factor * factor), whole * factor
            if rest % factor == 0:
                rest //= factor
                product *= self.form(self.atom("prime", factor, positive=True))
            factor += 1
        if rest > 1:
            product *= self.form(self.atom("prime", rest, positive=True))
        return product * Fraction(whole, value.denominator)

    def atom(
        self, kind: str, of: Hashable, *, varies: bool = False, positive: bool = False
    ) -> int:
        """The number of an atom, which is made where it is new."""
        if (kind, of) not in self._numbers:
            self._numbers[kind, of] = len(self.atoms)
            self.atoms.append(Atom(kind, of, varies, positive))
        return self._numbers[kind, of]

    def form(self, atom: int, exponent: Fraction = Fraction(1)) -> Form:
        """A power of an atom."""
        return Form(self, {((atom, exponent),): Fraction(1)})

    def varies(self, product: Product) -> bool:
        """Whether a product differs within a row."""
        return any(self.atoms[atom].varies for atom, _ in product)

    def positive(self, terms: Sum) -> bool:
        """Whether a sum is known to be more than 0."""
        return all(
            c > 0 and all(self.atoms[a].positive for a, _ in p)
            for p, c in terms.items()
        )

    def times(self, left: Sum, right: Sum) -> Sum:
        """The product of two sums, multiplied out."""
        # The proof runs at the first call: a form this large is given up.
        if len(left) * len(right) > 4 * _MOST_TERMS:
            raise UnknownError
        found: dict[Product, Fraction] = {}
        for a, p in left.items():
            for b, q in right.items():
                for product, factor in self._rooted(_joined(a, b)):
                    found[product] = found.get(product, Fraction(0)) + p * q * factor
        return _small({p: c for p, c in found.items() if c})

    def _rooted(self, product: Product) -> Iterator[tuple[Product, Fraction]]:
        """The same without squares of roots."""
        for atom, exponent in product:
            kind, of = self.atoms[atom][:2]
            whole = exponent // 2
            if kind not in ("root", "prime") or not whole:
                continue
            rest = tuple(each for each in product if each[0] != atom)
            if exponent % 2:
                rest = _joined(rest, ((atom, exponent % 2),))
            if kind == "prime":
                assert isinstance(of, int)
                base: Sum = {(): Fraction(of) ** int(whole)}
            # Roots in a denominator are kept there, with positive powers
            # (`Form._plain`).
            elif exponent < 0:
                raise UnknownError
            else:
                base = _terms(of)
                for _ in range(int(whole) - 1):
                    base = self.times(base, _terms(of))
            yield from self.times({rest: Fraction(1)}, base).items()
            return
        yield product, Fraction(1)


@dataclass(frozen=True, eq=False)
class Form:
    """A function of the letters of an `Algebra`: a quotient of two sums.

    A root is in a denominator or in a numerator, and never to a negative power.
    """

    algebra: Algebra
    above: Sum
    below: Sum = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.below is None:
            object.__setattr__(self, "below", _ONE)

    def _other(self, value: Form | float | Fraction) -> Form:
        return value if isinstance(value, Form) else self.algebra.number(value)

    def __add__(self, value: Form | float | Fraction) -> Form:
        other, times = self._other(value), self.algebra.times
        # Forms over one denominator stay small; cross products double at each sum.
        if self.below == other.below:
            return Form(self.algebra, _added(self.above, other.above), self.below)
        left, right = times(self.above, other.below), times(other.above, self.below)
        below = times(self.below, other.below)
        return Form(self.algebra, _added(left, right), below)

    def __mul__(self, value: Form | float | Fraction) -> Form:
        other, times = self._other(value), self.algebra.times
        above, below = times(self.above, other.above), times(self.below, other.below)
        return Form(self.algebra, above, below)._plain()

    def __neg__(self) -> Form:
        return self * -1

    def __sub__(self, value: Form | float | Fraction) -> Form:
        return self + -self._other(value)

    def __truediv__(self, value: Form | float | Fraction) -> Form:
        other = self._other(value)
        if not other.above:
            raise UnknownError  # a division by 0
        inverse = Form(self.algebra, other.below, other.above)._plain()
        return self * inverse

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, value: float) -> Form:
        return self._other(value) - self

    def __rtruediv__(self, value: float) -> Form:
        return self._other(value) / self

    def __pow__(self, exponent: int) -> Form:
        if abs(exponent) > _MOST_POWER:
            raise UnknownError
        result = self.algebra.number(1)
        for _ in range(abs(exponent)):
            result *= self
        return result if exponent >= 0 else 1 / result

    def _plain(self) -> Form:
        """The same with nothing but roots below, where one product was below."""
        if len(self.below) != 1 or self.below == _ONE:
            return self
        ((product, factor),) = self.below.items()
        kinds = self.algebra.atoms
        roots = tuple(each for each in product if kinds[each[0]].kind == "root")
        rest = tuple((a, -e) for a, e in product if kinds[a].kind != "root")
        above = self.algebra.times(self.above, {rest: 1 / factor})
        return Form(self.algebra, above, {roots: Fraction(1)} if roots else _ONE)

    def terms(self) -> Sum:
        """The sum that this is, if nothing is below."""
        if self.below != _ONE:
            raise UnknownError
        return self.above

    def is_equal(self, other: Form) -> bool:
        """Whether two functions are the same for all numbers."""
        times = self.algebra.times
        left, right = times(self.above, other.below), times(other.above, self.below)
        return left == right


def form_of(algebra: Algebra, terms: Hashable) -> Form:
    """The sum that an atom was made of."""
    return Form(algebra, _terms(terms))


def frozen(terms: Sum) -> Hashable:
    """A sum as an atom holds it."""
    return frozenset(terms.items())


def _terms(of: Hashable) -> Sum:
    assert isinstance(of, frozenset)
    return dict(of)


def _joined(left: Product, right: Product) -> Product:
    if not left or not right:
        return left or right
    found = dict(left)
    for atom, exponent in right:
        found[atom] = found.get(atom, Fraction(0)) + exponent
    # In one order, so that equal products are equal keys.
    return tuple(sorted((a, e) for a, e in found.items() if e))


def _added(left: Sum, right: Sum) -> Sum:
    found = dict(left)
    for product, factor in right.items():
        found[product] = found.get(product, Fraction(0)) + factor
    return _small({p: c for p, c in found.items() if c})


def _small(terms: Sum) -> Sum:
    if len(terms) > _MOST_TERMS:
        raise UnknownError
    return terms
