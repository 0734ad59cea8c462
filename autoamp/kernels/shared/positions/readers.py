"""What the result of one op holds, if its operands are made of sizes and numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.kernels.shared.positions.elements import (
    UnknownError,
    comparison,
    only,
    parted,
    plain,
    result,
)
from autoamp.kernels.shared.positions.sizes import shape_of
from autoamp.kernels.shared.positions.statements import (
    FAILS,
    HOLDS,
    AtMostZero,
    Choice,
    Element,
    Every,
    Some,
    Statement,
    Whole,
    both,
    chosen,
    either,
    opposite,
    simplified,
)
from autoamp.kernels.shared.positions.views import (
    VIEWS,
    Positions,
    Reader,
    argument,
    known_size,
)


def _filled(at: int) -> Reader:
    def read(positions: Positions, node: fx.Node) -> Element:
        return positions.known(node.args[at])

    return read


def _number(value: float) -> Reader:
    return lambda *_: value


def _arange(_: Positions, node: fx.Node) -> Element:
    overload = compat.schema(node.target).overload_name  # type: ignore[arg-type]
    start = known_size(node.args[0]) if overload.startswith("start") else 0
    has_step = overload == "start_step" and len(node.args) > 2
    step = known_size(node.args[2]) if has_step else 1
    if not isinstance(step, int):
        raise UnknownError
    return _trimmed(Whole(((-1, step),), start), node)


def _trimmed(found: Whole, node: fx.Node) -> Whole:
    """Without the dimensions of size 1, in which there is position 0 alone."""
    sizes = shape_of(node)
    return Whole(tuple((d, f) for d, f in found.factors if sizes[d] != 1), found.number)


def _cumsum(positions: Positions, node: fx.Node) -> Element:
    added = positions.known(node.args[0])
    if isinstance(added, (AtMostZero, Every, Some)):
        added = {HOLDS: 1.0, FAILS: 0.0}.get(simplified(added, shape_of(node)), added)
    if isinstance(added, float) and added.is_integer():
        added = Whole((), int(added))
    if (
        not isinstance(added, Whole)
        or added.factors
        or not isinstance(added.number, int)
    ):
        raise UnknownError
    rank = len(shape_of(node))
    dimension = int(argument(node, 1, "dim")) % rank - rank
    counted = _trimmed(Whole(((dimension, 1),), 1), node)
    return Whole((), 0).plus(counted, added.number)


def _diff(positions: Positions, node: fx.Node) -> Element:
    """Differences of numbers that grow evenly, also from the one put before them."""
    if argument(node, 1, "n", 1) != 1 or len(node.args) != 4:
        raise UnknownError
    dtype = node.meta["val"].dtype
    counted, before = (positions.numbers(node.args[at], dtype) for at in (0, 3))
    rank = len(shape_of(node))
    dimension = int(argument(node, 2, "dim", -1)) % rank
    if not (isinstance(counted, Whole) and isinstance(before, Whole)):
        raise UnknownError
    if shape_of(node.args[3])[dimension] != 1:  # type: ignore[arg-type]
        raise UnknownError
    step = dict(counted.factors).get(dimension - rank, 0)
    left = tuple((d, f) for d, f in counted.factors if d != dimension - rank)
    if Whole(left, counted.number).plus(before, -1) != Whole((), step):
        raise UnknownError
    return Whole((), step)


def _band(*, lower: bool) -> Reader:
    def read(positions: Positions, node: fx.Node) -> Element:
        found = positions.known(node.args[0])
        diagonal = Whole((), known_size(argument(node, 1, "diagonal", 0)))
        over = _trimmed(Whole(((-2, -1), (-1, 1)), 0), node).plus(diagonal, -1)
        zero = Whole((), 0)
        inside = AtMostZero(over if lower else zero.plus(over, -1))
        return only(found, inside)

    return read


def _masked_fill(positions: Positions, node: fx.Node) -> Element:
    found, mask, value = node.args[:3]
    number = positions.known(value)
    kept = positions.known(found)
    if isinstance(kept, (AtMostZero, Every, Some)):
        mark = positions.statement(mask)
        if number not in (HOLDS, FAILS):
            raise UnknownError
        return either(kept, mark) if number == HOLDS else both(kept, opposite(mark))
    return parted(positions.statement(mask), plain(number), kept)


def _chosen_by(positions: Positions, node: fx.Node) -> Element:
    if len(node.args) != 3:
        raise UnknownError
    one, other = (positions.known(each) for each in node.args[1:])
    return parted(positions.statement(node.args[0]), one, other)


def _same(positions: Positions, node: fx.Node) -> Element:
    return positions.known(node.args[0])


def _calculated(
    how: Callable[[float, float], float],
) -> Reader:
    """A sum, difference, product or quotient."""

    def read(positions: Positions, node: fx.Node) -> Element:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
            raise UnknownError
        dtype = node.meta["val"].dtype
        return result(how, *(positions.numbers(each, dtype) for each in node.args))

    return read


def _turned(how: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda one, other: how(other, one)


def _negative(positions: Positions, node: fx.Node) -> Element:
    found = positions.numbers(node.args[0], node.meta["val"].dtype)
    return result(operator.mul, found, Whole((), -1))


def _compared(
    how: Callable[[Any, Any], bool],
) -> Reader:
    def read(positions: Positions, node: fx.Node) -> Element:
        values: list[Any] = [
            n.meta["val"] if isinstance(n, fx.Node) else n for n in node.args[:2]
        ]
        values = [1 if isinstance(v, torch.SymInt) else v for v in values]
        dtype = torch.result_type(*values)
        one, other = (positions.numbers(each, dtype) for each in node.args[:2])
        if isinstance(one, Whole) and isinstance(other, Whole):
            return comparison(how, one.plus(other, -1))
        found = result(lambda a, b: float(how(a, b)), one, other)
        if isinstance(found, Choice):
            return chosen(found.where, bool(found.number), bool(found.otherwise))
        return HOLDS if found else FAILS

    return read


def _joined(
    how: Callable[[Statement, Statement], Statement],
) -> Reader:
    def read(positions: Positions, node: fx.Node) -> Element:
        if node.meta["val"].dtype != torch.bool:
            raise UnknownError  # bits of whole numbers
        return how(*(positions.statement(each) for each in node.args[:2]))

    return read


def _inverted(positions: Positions, node: fx.Node) -> Element:
    if node.meta["val"].dtype != torch.bool:
        raise UnknownError
    return opposite(positions.statement(node.args[0]))


READERS: dict[str, Reader] = {
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _number(1.0)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _number(0.0)),
    **dict.fromkeys(("full", "full_like"), _filled(1)),
    **dict.fromkeys(
        ("alias", "clone", "contiguous", "detach", "to", "_to_copy"), _same
    ),
    **dict.fromkeys(("type_as", "lift_fresh_copy"), _same),
    **VIEWS,
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), _joined(both)),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), _joined(either)),
    **dict.fromkeys(("logical_not", "bitwise_not"), _inverted),
    **{name: _compared(getattr(operator, name)) for name in ("le", "lt", "ge", "gt")},
    **{name: _compared(getattr(operator, name)) for name in ("eq", "ne")},
    **{name: _calculated(getattr(operator, name)) for name in ("add", "sub", "mul")},
    **dict.fromkeys(("div", "true_divide"), _calculated(operator.truediv)),
    "rsub": _calculated(_turned(operator.sub)),
    "neg": _negative,
    "new_full": _filled(2),
    "scalar_tensor": _filled(0),
    "arange": _arange,
    "cumsum": _cumsum,
    "tril": _band(lower=True),
    "triu": _band(lower=False),
    "masked_fill": _masked_fill,
    "where": _chosen_by,
    "diff": _diff,
}
"""The ops whose results are known, each with the function that tells the result."""
