"""Normal forms of calls: two spellings of a function are equal if their forms are.

A `Form` is a sum of products of powers.  A factor of a product is a letter (the data, a
weight), the result of an op such as `tanh`, a root, or a sum in brackets.  The order of
terms and of factors does not count, a number goes before its product, `x * x * x` is
`x ** 3`, and `a / sqrt(b)` is `a * b ** -0.5`.  No bracket is multiplied out, no terms
cancel, and no op is known by another: `1 / (1 + exp(-x))` is not `sigmoid(x)`.

Two numbers are equal if they are one number in fp32, in which a chain is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass
from typing import Any

from autoamp.dtypes import HIGH_DTYPE

Product = frozenset[tuple[Hashable, int]]
"""Factors and their exponents; without factors, 1."""

_ONE: Product = frozenset()


@dataclass(frozen=True, eq=False)
class Form:
    """Products, and the number before each: their sum is the function."""

    terms: Mapping[Product, float]

    @property
    def key(self) -> Hashable:
        """The same for equal forms."""
        return frozenset((p, c_float(c).value) for p, c in self.terms.items())

    def __add__(self, value: Form | float) -> Form:
        other = _form(value)
        if not other.terms.keys().isdisjoint(self.terms):
            # Adding a large number and subtracting it rounds in fp32.
            raise TypeError("terms that may cancel")
        return Form({**self.terms, **other.terms})

    def __mul__(self, value: Form | float) -> Form:
        other = _form(value)
        for number, rest in ((self, other), (other, self)):
            if number.terms.keys() <= {_ONE}:
                by = number.terms.get(_ONE, 0.0)
                return Form({p: c * by for p, c in rest.terms.items() if c * by})
        # A bracket stays one factor.  Multiplied out, a sum whose terms nearly cancel
        # keeps the rounding of each term: equal for real numbers, and not in fp32.
        left, right = self._product(), other._product()
        factors = dict(left[0])
        for factor, exponent in right[0]:
            factors[factor] = factors.get(factor, 0) + exponent
        product = frozenset((f, e) for f, e in factors.items() if e)
        return Form({product: left[1] * right[1]})

    def _product(self) -> tuple[Product, float]:
        """This form as one product, and the number before it."""
        if len(self.terms) == 1:
            ((product, number),) = self.terms.items()
            return product, number
        if not self.terms:
            return _ONE, 0.0
        # By its largest number, so that `2 + 2 * x` is twice `1 + x`.
        number = max(self.terms.values(), key=lambda c: (abs(c), c))
        return frozenset({((self * (1 / number)).key, 1)}), number

    def __pow__(self, exponent: float) -> Form:
        if isinstance(exponent, bool) or not isinstance(exponent, int | float):
            raise TypeError("the exponent is no number")
        if not float(exponent).is_integer():
            # Neither the root of a square nor the square of a root is the number itself
            # where that is less than 0.
            if not float(2 * exponent).is_integer():
                raise TypeError("a root that is no square root")
            return letter(("root", self.key)) ** (2 * exponent)
        product, number = self._product()
        powers = frozenset((f, e * int(exponent)) for f, e in product if exponent)
        return Form({powers: float(number**exponent)})

    def __neg__(self) -> Form:
        return self * -1.0

    def __sub__(self, value: Form | float) -> Form:
        return self + -_form(value)

    def __truediv__(self, value: Form | float) -> Form:
        return self * _form(value) ** -1

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, value: float) -> Form:
        return -self + value

    def __rtruediv__(self, value: float) -> Form:
        return _form(value) / self


def _form(value: Any) -> Form:
    if isinstance(value, Form):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("an operand is no number")
    return Form({_ONE: float(value)} if value else {})


def letter(factor: Hashable) -> Form:
    """A factor of which nothing else is known: the data, a vector, an op's result."""
    return Form({frozenset({(factor, 1)}): 1.0})


def _op(name: str) -> Callable[[Form], Form]:
    return lambda self: letter((name, self.key))


erf, exp, log, sigmoid = _op("erf"), _op("exp"), _op("log"), _op("sigmoid")
softplus, tanh = _op("softplus"), _op("tanh")
mean, row_sum, logsumexp = _op("mean"), _op("sum"), _op("logsumexp")


def variance(self: Form) -> Form:
    """The variance of a row, over its size."""
    return mean((self - mean(self)) ** 2)


_ELEMENTS: dict[str, Callable[..., Form]] = {
    "add": operator.add,
    "div": operator.truediv,
    "erf": erf,
    "exp": exp,
    "log": log,
    "mul": operator.mul,
    "neg": operator.neg,
    "pow": operator.pow,
    "reciprocal": lambda self: 1 / self,
    "rsqrt": lambda self: self**-0.5,
    "rsub": lambda self, other: other - self,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "sqrt": lambda self: self**0.5,
    "square": lambda self: self**2,
    "sub": operator.sub,
    "tanh": tanh,
    "true_divide": operator.truediv,
    "truediv": operator.truediv,
}
"""Functions of each element.  They take no argument that would change their meaning."""

_ROWS = {"logsumexp": logsumexp, "mean": mean, "sum": row_sum, "var": variance}
"""Functions of each row."""

OPS = frozenset({*_ELEMENTS, *_ROWS})
"""The names of the ops that have forms."""


def form_of(name: str, dims: int, args: Sequence[Any], kwargs: Any) -> Form:
    """The form of the result of a call of an op.

    Args:
        name: the op's, without a namespace.
        dims: the number of dimensions of the data, whose last ones are the rows.
        args, kwargs: the arguments, a `Form` for each tensor.

    Raises:
        TypeError, ArithmeticError: the call has no form.
    """
    if name in _ROWS:
        spread = ("unbiased",) if name == "var" else ()
        names = ("self", "dim", *spread, "keepdim", "dtype")
        named = zip(names[: len(args)], args, strict=True)
        return _of_rows(_ROWS[name], dims, **dict(named), **kwargs)
    if name not in _ELEMENTS:
        raise TypeError(name)
    return _form(_ELEMENTS[name](*args, **kwargs))


def _of_rows(
    op: Callable[[Form], Form],
    dims: int,
    self: Form,
    dim: Any = None,
    keepdim: bool = False,
    **rest: Any,
) -> Form:
    last = [dim] if isinstance(dim, int) else dim
    if not keepdim or last is None or [*last] not in ([-1], [dims - 1]):
        raise TypeError("a result that is not one number for each row")
    correction = rest.pop("correction", None)
    over = rest.pop("unbiased", True) if correction is None else correction
    if rest.pop("dtype", None) not in (None, HIGH_DTYPE) or rest:
        raise TypeError("another dtype")
    if op is variance and over:
        raise TypeError("a variance that is not over the size of the row")
    return op(self)
