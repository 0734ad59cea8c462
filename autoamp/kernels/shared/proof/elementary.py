"""Exponentials, logarithms, roots, sums over rows and slopes of forms."""

from __future__ import annotations

from fractions import Fraction

from autoamp.kernels.shared.proof.algebra import (
    Algebra,
    Form,
    Product,
    Sum,
    UnknownError,
    form_of,
    frozen,
)

_HALF = Fraction(1, 2)


def exp(value: Form) -> Form:
    """`exp(a + b)` is `exp(a) exp(b)`, and `exp(2 log(a))` is `a * a`."""
    algebra, result = value.algebra, value.algebra.number(1)
    for product, factor in value.terms().items():
        logarithm = _logarithm(algebra, product)
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
    sign = 1 if terms[max(terms)] > 0 else -1
    varies = any(algebra.varies(product) for product in terms)
    of = frozen((value * sign).terms())
    return sign * algebra.form(algebra.atom("erf", of, varies=varies))


def root(value: Form) -> Form:
    """The square root, a number taken out of it: `sqrt(a a)` is not known to be `a`."""
    algebra, terms = value.algebra, value.terms()
    if not terms:
        return value
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
