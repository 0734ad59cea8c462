"""Ops as forms: exponentials, sums over rows, derivatives; `aten::var` and so on.

The functions of ops have the arguments that torch has, under torch's names, and raise
`UnknownError` for whatever is no smooth function of elements or of rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autoamp.dtypes import HIGH_DTYPE
from autoamp.passes.kernels.algebra import (
    Algebra,
    Form,
    Product,
    Sum,
    UnknownError,
    form_of,
    frozen,
)


def exp(value: Form) -> Form:
    """`exp(a + b)` is `exp(a) exp(b)`, and `exp(2 log(a))` is `a * a`."""
    algebra, result = value.algebra, value.algebra.number(1)
    for product, factor in value.terms().items():
        logarithm = _logarithm(algebra, product)
        # `exp(log(a) / 3)` would be a third root, which no atom is.
        if logarithm is not None and factor.denominator <= 2:
            result *= power(logarithm, factor)
        else:
            result *= _exp_of(algebra, product, factor)
    return result


def _exp_of(algebra: Algebra, product: Product, factor: Fraction) -> Form:
    varies = algebra.varies(product)
    atom = algebra.atom("exp", product, varies=varies, positive=True)
    return algebra.form(atom, factor)


def _logarithm(algebra: Algebra, product: Product) -> Form | None:
    """`a` where the product is `log(a)`."""
    if len(product) != 1 or product[0][1] != 1:
        return None
    atom = algebra.atoms[product[0][0]]
    return form_of(algebra, atom.of) if atom.kind == "log" else None


def log(value: Form) -> Form:
    """`log(exp(a) b)` is `a + log(b)`, and of positive ones so is `log(a b)`."""
    algebra = value.algebra
    if not value.above:
        raise UnknownError
    if value.below == algebra.number(1).above:
        return _log(algebra, value.above)
    if not (algebra.positive(value.above) and algebra.positive(value.below)):
        raise UnknownError
    return _log(algebra, value.above) - _log(algebra, value.below)


def _log(algebra: Algebra, terms: Sum) -> Form:
    result = algebra.number(0)
    for number in sorted({atom for product in terms for atom, _ in product}):
        atom = algebra.atoms[number]
        if atom.kind == "exp":
            least = min(dict(p).get(number, Fraction(0)) for p in terms)
            terms = algebra.times(terms, {((number, -least),): Fraction(1)})
            assert isinstance(atom.of, tuple)
            result += Form(algebra, {atom.of: least} if least else {})
    if len(terms) > 1 or not algebra.positive(terms):
        return result + _log_atom(algebra, terms)
    ((product, factor),) = terms.items()
    for number, exponent in product:
        result += _log_atom(algebra, algebra.form(number).above) * exponent
    return result if factor == 1 else result + _log_atom(algebra, {(): factor})


def _log_atom(algebra: Algebra, terms: Sum) -> Form:
    varies = any(algebra.varies(product) for product in terms)
    return algebra.form(algebra.atom("log", frozen(terms), varies=varies))


def erf(value: Form) -> Form:
    """`erf(-a)` is `-erf(a)`."""
    algebra, terms = value.algebra, value.terms()
    if not terms:
        return value
    # One sign for both spellings, so that `erf(x)` and `-erf(-x)` are one atom.
    sign = 1 if terms[max(terms)] > 0 else -1
    varies = any(algebra.varies(product) for product in terms)
    of = frozen((value * sign).terms())
    return sign * algebra.form(algebra.atom("erf", of, varies=varies))


def root(value: Form) -> Form:
    """The square root, a number taken out of it: `sqrt(a a)` is not known to be `a`."""
    algebra, terms = value.algebra, value.terms()
    if not terms:
        return value
    # A number taken out of the root, so that `sqrt(4 * a)` and `2 * sqrt(a)` are one
    # form.
    size = abs(terms[max(terms)])
    base = (value * (1 / size)).terms()
    result = algebra.root_of(size)
    if base == algebra.number(1).above:
        return result
    varies = any(algebra.varies(product) for product in base)
    return result * algebra.form(algebra.atom("root", frozen(base), varies=varies))


def power(value: Form, exponent: Fraction) -> Form:
    """A whole power, or one of a square root."""
    if exponent.denominator == 1:
        return value ** int(exponent)
    if exponent.denominator != 2:
        raise UnknownError
    return root(value) ** int(2 * exponent)


def tanh(value: Form) -> Form:
    """The hyperbolic tangent."""
    once = exp(value * -2)
    return (1 - once) / (1 + once)


def sigmoid(value: Form) -> Form:
    """The logistic function."""
    return 1 / (1 + exp(-value))


def row_sum(value: Form) -> Form:
    """The sum over a row: sums are summed by parts, and constant factors come out."""
    algebra = value.algebra
    # A sum of quotients with different denominators is no quotient of the sums.
    if not algebra.size or any(algebra.varies(product) for product in value.below):
        raise UnknownError
    result = algebra.number(0)
    for product, factor in value.above.items():
        inner = tuple(e for e in product if algebra.atoms[e[0]].varies)
        outer = tuple(e for e in product if not algebra.atoms[e[0]].varies)
        part = algebra.number(algebra.size)
        if inner:
            positive = algebra.positive({inner: Fraction(1)})
            part = algebra.form(algebra.atom("sum", inner, positive=positive))
        result += Form(algebra, {outer: factor}) * part
    return result / Form(algebra, value.below)


def row_mean(value: Form) -> Form:
    """The mean of a row."""
    return row_sum(value) * Fraction(1, value.algebra.size or 1)


def row_variance(value: Form, correction: Fraction = Fraction(0)) -> Form:
    """The variance of a row, over its size less `correction`."""
    left = value.algebra.size - correction
    if left <= 0:
        raise UnknownError
    return row_sum((value - row_mean(value)) ** 2) * (1 / left)


def row_max(value: Form) -> Form:
    """The largest number of a row, of which nothing else is known."""
    algebra = value.algebra
    if not algebra.size:
        raise UnknownError
    return algebra.form(algebra.atom("max", frozen(value.terms())))


def slope(value: Form, letter: Form) -> Form:
    """The derivative by a letter, of a function of one element."""
    algebra = value.algebra
    above, below = Form(algebra, value.above), Form(algebra, value.below)
    by_above = _slope_of_sum(above, letter)
    if value.below == algebra.number(1).above:
        return by_above
    by_below = _slope_of_sum(below, letter)
    return (by_above * below - above * by_below) / (below * below)


def _slope_of_sum(value: Form, letter: Form) -> Form:
    algebra, result = value.algebra, value.algebra.number(0)
    for product, factor in value.above.items():
        for atom, exponent in product:
            if not algebra.atoms[atom].varies:
                continue
            rest = tuple((a, e - (a == atom)) for a, e in product)
            plain = tuple(each for each in rest if each[1])
            inner = _slope_of_atom(algebra, atom, letter)
            result += Form(algebra, {plain: factor * exponent}) * inner
    return result


def _slope_of_atom(algebra: Algebra, atom: int, letter: Form) -> Form:
    kind, of = algebra.atoms[atom][:2]
    if kind == "letter":
        return algebra.number(int(algebra.form(atom).is_equal(letter)))
    if kind == "exp":
        assert isinstance(of, tuple)
        inner = Form(algebra, {of: Fraction(1)})
        return algebra.form(atom) * _slope_of_sum(inner, letter)
    if kind == "erf":
        inner = form_of(algebra, of)
        bell = exp(-(inner * inner)) * algebra.number(2) / _root_of_pi(algebra)
        return bell * _slope_of_sum(inner, letter)
    raise UnknownError


def _root_of_pi(algebra: Algebra) -> Form:
    """`sqrt(pi)`, which is `sqrt(2) / sqrt(2 / pi)`."""
    of_pi = algebra.atom("letter", "sqrt(2/pi)", positive=True)
    return algebra.root_of(Fraction(2)) / algebra.form(of_pi)


_THRESHOLD = 20
"""From where torch's softplus is its input: `exp(-20)` is nothing beside 20 in fp32."""


@dataclass(frozen=True)
class Meaning:
    """The meaning of a tensor: a form, and whether it has the size of a whole row.

    A mean over a row has one element for each row, so that its own sum is itself.
    """

    form: Form
    is_whole: bool = True


def meaning(
    name: str, algebra: Algebra, dims: int, args: Sequence[Any], kwargs: Any
) -> Meaning:
    """The meaning of the result of a call of an op.

    Args:
        name: the op's, without a namespace.
        dims: the number of dimensions of the data, whose last ones are the rows.
        args, kwargs: the arguments, a `Meaning` for each tensor.
    """
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Meaning)]
    if not tensors:
        raise UnknownError
    if name in _ROWS:
        return _of_rows(name, algebra, dims, args, kwargs)
    op = _ELEMENTS.get(name)
    if op is None:
        raise UnknownError
    given = [_form(algebra, value) for value in args]
    named = {key: _form(algebra, value) for key, value in kwargs.items()}
    try:
        # An argument that is not known here, `out=` say, may change what the op means.
        inspect.signature(op).bind(*given, **named)
    except TypeError as error:
        raise UnknownError from error
    return Meaning(op(*given, **named), any(each.is_whole for each in tensors))


def _of_rows(
    name: str, algebra: Algebra, dims: int, args: Sequence[Any], kwargs: Any
) -> Meaning:
    names, op = _ROWS[name]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    data = values.pop("self", None)
    is_kept = values.pop("keepdim", False) is True
    if not isinstance(data, Meaning) or len(args) > len(names) or not is_kept:
        raise UnknownError
    if not _is_last(values.pop("dim", None), dims):
        raise UnknownError
    if values.pop("dtype", None) not in (None, HIGH_DTYPE):
        raise UnknownError
    if data.is_whole:
        rest = {key: _form(algebra, value) for key, value in values.items()}
        return Meaning(op(data.form, **rest), is_whole=False)
    if name not in ("sum", "mean", "amax"):
        raise UnknownError
    return data  # there is one element to each row


def _form(algebra: Algebra, value: Any) -> Any:
    if isinstance(value, Meaning):
        return value.form
    return algebra.number(value) if isinstance(value, float) else value


def _is_last(dim: Any, dims: int) -> bool:
    if isinstance(dim, list | tuple) and len(dim) == 1:
        (dim,) = dim
    is_number = isinstance(dim, int) and not isinstance(dim, bool)
    return is_number and dim in (-1, dims - 1)


def _number(value: Any) -> Fraction:
    """A number of the call, not a tensor and not a switch."""
    if isinstance(value, Form) and value.above.keys() <= {()}:
        return value.terms().get((), Fraction(0))
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    raise UnknownError


def _add(self: Any, other: Any, alpha: Any = 1) -> Form:
    return _operand(self) + _operand(other) * _operand(alpha)  # type: ignore[no-any-return]


def _operand(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | Form):
        raise UnknownError
    return value if isinstance(value, Form) else Fraction(value)


def _sub(self: Any, other: Any, alpha: Any = 1) -> Form:
    return _operand(self) - _operand(other) * _operand(alpha)  # type: ignore[no-any-return]


def _rsub(self: Any, other: Any, alpha: Any = 1) -> Form:
    return _sub(other, self, alpha)


def _mul(self: Any, other: Any) -> Form:
    return _operand(self) * _operand(other)  # type: ignore[no-any-return]


def _div(self: Any, other: Any, rounding_mode: str | None = None) -> Form:
    if rounding_mode is not None:
        raise UnknownError
    return _operand(self) / _operand(other)  # type: ignore[no-any-return]


def _neg(self: Form) -> Form:
    return -self


def _pow(self: Any, exponent: Any) -> Form:
    return power(_operand(self), _number(exponent))


def _reciprocal(self: Form) -> Form:
    return 1 / self


def _square(self: Form) -> Form:
    return self * self


def _rsqrt(self: Form) -> Form:
    return 1 / root(self)


def _log1p(self: Form) -> Form:
    return log(1 + self)


def _softplus(self: Form, beta: Any = 1, threshold: Any = _THRESHOLD) -> Form:
    # Another threshold cuts where fp32 still tells the two apart.
    if _number(beta) != 1 or _number(threshold) != _THRESHOLD:
        raise UnknownError
    return log(1 + exp(self))


def _var(self: Form, unbiased: Any = True, correction: Any = None) -> Form:
    if not isinstance(unbiased, bool):
        raise UnknownError
    # `var` is told one of two arguments, by its overload.
    said = int(unbiased) if correction is None else correction
    return row_variance(self, _number(said))


def _std(self: Form, unbiased: Any = True, correction: Any = None) -> Form:
    return root(_var(self, unbiased, correction))


def _logsumexp(self: Form) -> Form:
    return log(row_sum(exp(self)))


_ELEMENTS: dict[str, Callable[..., Form]] = {
    "add": _add,
    "div": _div,
    "erf": erf,
    "exp": exp,
    "log": log,
    "log1p": _log1p,
    "mul": _mul,
    "neg": _neg,
    "pow": _pow,
    "reciprocal": _reciprocal,
    "rsqrt": _rsqrt,
    "rsub": _rsub,
    "sigmoid": sigmoid,
    "softplus": _softplus,
    "sqrt": root,
    "square": _square,
    "sub": _sub,
    "tanh": tanh,
    "true_divide": _div,
    "truediv": _div,
}
"""Functions of each element.  Each has the names of torch's arguments or raises."""

_ONE_ROW = ("self", "dim", "keepdim", "dtype")
_SPREAD = ("self", "dim", "unbiased", "keepdim")

_ROWS: dict[str, tuple[tuple[str, ...], Callable[..., Form]]] = {
    "amax": (_ONE_ROW[:3], row_max),
    "logsumexp": (_ONE_ROW[:3], _logsumexp),
    "mean": (_ONE_ROW, row_mean),
    "std": (_SPREAD, _std),
    "sum": (_ONE_ROW, row_sum),
    "var": (_SPREAD, _var),
}
"""Functions of rows, and the order of their arguments."""
