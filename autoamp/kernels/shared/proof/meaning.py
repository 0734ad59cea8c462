"""What the ops of chains mean, as forms: `aten::var` is a mean of squares, and so on.

The functions have the arguments that torch has, under torch's names, and raise
`UnknownError` for whatever is no smooth function of elements or of rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autoamp.dtypes import HIGH_DTYPE
from autoamp.kernels.shared.proof import elementary
from autoamp.kernels.shared.proof.algebra import Algebra, Form, UnknownError

_THRESHOLD = 20
"""From where torch's softplus is its input: `exp(-20)` is nothing beside 20 in fp32."""


@dataclass(frozen=True)
class Meaning:
    """What a tensor is: a form, and whether it has the size of a whole row.

    A mean over a row has one element for each row, so that its own sum is itself.
    """

    form: Form
    is_whole: bool = True


def meaning(
    name: str, algebra: Algebra, dims: int, args: Sequence[Any], kwargs: Any
) -> Meaning:
    """What a call of an op results in.

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
    return elementary.power(_operand(self), _number(exponent))


def _reciprocal(self: Form) -> Form:
    return 1 / self


def _square(self: Form) -> Form:
    return self * self


def _rsqrt(self: Form) -> Form:
    return 1 / elementary.root(self)


def _log1p(self: Form) -> Form:
    return elementary.log(1 + self)


def _softplus(self: Form, beta: Any = 1, threshold: Any = _THRESHOLD) -> Form:
    if _number(beta) != 1 or _number(threshold) != _THRESHOLD:
        raise UnknownError
    return elementary.log(1 + elementary.exp(self))


def _var(self: Form, unbiased: Any = True, correction: Any = None) -> Form:
    if not isinstance(unbiased, bool):
        raise UnknownError
    said = int(unbiased) if correction is None else correction
    return elementary.row_variance(self, _number(said))


def _std(self: Form, unbiased: Any = True, correction: Any = None) -> Form:
    return elementary.root(_var(self, unbiased, correction))


def _logsumexp(self: Form) -> Form:
    return elementary.log(elementary.row_sum(elementary.exp(self)))


_ELEMENTS: dict[str, Callable[..., Form]] = {
    "add": _add,
    "div": _div,
    "erf": elementary.erf,
    "exp": elementary.exp,
    "log": elementary.log,
    "log1p": _log1p,
    "mul": _mul,
    "neg": _neg,
    "pow": _pow,
    "reciprocal": _reciprocal,
    "rsqrt": _rsqrt,
    "rsub": _rsub,
    "sigmoid": elementary.sigmoid,
    "softplus": _softplus,
    "sqrt": elementary.root,
    "square": _square,
    "sub": _sub,
    "tanh": elementary.tanh,
    "true_divide": _div,
    "truediv": _div,
}
"""Functions of each element.  Each has the names of torch's arguments or raises."""

_ONE_ROW = ("self", "dim", "keepdim", "dtype")
_SPREAD = ("self", "dim", "unbiased", "keepdim")

_ROWS: dict[str, tuple[tuple[str, ...], Callable[..., Form]]] = {
    "amax": (_ONE_ROW[:3], elementary.row_max),
    "logsumexp": (_ONE_ROW[:3], _logsumexp),
    "mean": (_ONE_ROW, elementary.row_mean),
    "std": (_SPREAD, _std),
    "sum": (_ONE_ROW, elementary.row_sum),
    "var": (_SPREAD, _var),
}
"""Functions of rows, and the order of their arguments."""
