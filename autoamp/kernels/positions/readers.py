"""What the result of one op holds, if its operands are made of sizes and numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

from autoamp import compat
from autoamp.kernels.positions.elements import (
    UnknownError,
    as_numbers,
    comparison,
    only,
    parted,
    plain,
    result,
    shown,
)
from autoamp.kernels.positions.sizes import shape_of, size_of
from autoamp.kernels.positions.statements import (
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
    either,
    opposite,
)
from autoamp.op_names import base_name


class Positions(Protocol):
    """What is known of the operands (`reading.Positions`)."""

    def known(self, value: Any) -> Element:
        """What a tensor holds, or the number that an argument is, or an error."""

    def statement(self, value: Any) -> Statement:
        """What bools say, or where numbers are not 0."""


Reader = Callable[[Positions, fx.Node], Element]


def _argument(node: fx.Node, at: int, name: str, default: Any = None) -> Any:
    return node.args[at] if len(node.args) > at else node.kwargs.get(name, default)


def _size(value: Any) -> Size:
    found = size_of(value)
    if found is None:
        raise UnknownError
    return found


def _filled(at: int) -> Reader:
    def read(positions: Positions, node: fx.Node) -> Element:
        return positions.known(node.args[at])

    return read


def _number(value: float) -> Reader:
    return lambda *_: value


def _arange(_: Positions, node: fx.Node) -> Element:
    overload = compat.schema(node.target).overload_name  # type: ignore[arg-type]
    start = _size(node.args[0]) if overload.startswith("start") else 0
    step = _size(node.args[2]) if overload == "start_step" and len(node.args) > 2 else 1
    if not isinstance(step, int):
        raise UnknownError
    return _trimmed(Whole(((-1, step),), start), node)


def _trimmed(found: Whole, node: fx.Node) -> Whole:
    """Without the dimensions of size 1, in which there is position 0 alone."""
    sizes = shape_of(node)
    return Whole(tuple((d, f) for d, f in found.factors if sizes[d] != 1), found.number)


def _cumsum(positions: Positions, node: fx.Node) -> Element:
    added = positions.known(node.args[0])
    if isinstance(added, float) and added.is_integer():
        added = Whole((), int(added))
    if (
        not isinstance(added, Whole)
        or added.factors
        or not isinstance(added.number, int)
    ):
        raise UnknownError
    rank = len(shape_of(node))
    dimension = int(_argument(node, 1, "dim")) % rank - rank
    return _trimmed(Whole(((dimension, added.number),), added.number), node)


def _band(*, lower: bool) -> Reader:
    def read(positions: Positions, node: fx.Node) -> Element:
        found = positions.known(node.args[0])
        diagonal = Whole((), _size(_argument(node, 1, "diagonal", 0)))
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


def _viewed(positions: Positions, node: fx.Node) -> Element:
    """A view with the same sizes but for those that are 1, or an expansion."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = shape_of(source), shape_of(node)
    order: list[int | None] = [None] * len(after)
    name = base_name(node.target).removeprefix("aten::")  # type: ignore[arg-type]
    if name.startswith("expand"):
        order[len(after) - len(before) :] = range(len(before))
    else:
        old, new = (
            [i for i, s in enumerate(sizes) if s != 1] for sizes in (before, after)
        )
        if [before[i] for i in old] != [after[i] for i in new]:
            raise UnknownError
        for at, dimension in zip(new, old, strict=True):
            order[at] = dimension
    return shown(positions.known(source), len(before), order)


def _permuted(positions: Positions, node: fx.Node) -> Element:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rank = len(shape_of(source))
    order: list[int | None] = list(range(rank))
    name = base_name(node.target).removeprefix("aten::")  # type: ignore[arg-type]
    if name == "permute":
        order = [int(d) % rank for d in node.args[1]]  # type: ignore[arg-type, union-attr]
    elif rank > 1:
        one, other = node.args[1:3] if name == "transpose" else (-2, -1)
        one, other = int(one) % rank, int(other) % rank  # type: ignore[arg-type]
        order[one], order[other] = order[other], order[one]
    return shown(positions.known(source), rank, order)


def _sliced(positions: Positions, node: fx.Node) -> Element:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    sizes = shape_of(source)
    rank = len(sizes)
    dimension = int(_argument(node, 1, "dim", 0)) % rank
    if _argument(node, 4, "step", 1) != 1:
        raise UnknownError
    start = _argument(node, 2, "start")
    start = 0 if start is None else _size(start)
    if not isinstance(start, int):
        raise UnknownError
    if start < 0:
        if not isinstance(sizes[dimension], int):
            raise UnknownError
        start = max(start + sizes[dimension], 0)
    found = shown(positions.known(source), rank, range(rank), {dimension: start})
    is_one = shape_of(node)[dimension] == 1
    order = [None if is_one and d == dimension else d for d in range(rank)]
    return shown(found, rank, order)


def _selected(positions: Positions, node: fx.Node) -> Element:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    sizes = shape_of(source)
    dimension, at = int(node.args[1]) % len(sizes), _size(node.args[2])  # type: ignore[arg-type]
    if not isinstance(at, int) or at < 0:
        raise UnknownError
    order = [d for d in range(len(sizes)) if d != dimension]
    return shown(positions.known(source), len(sizes), order, {dimension: at})


def _calculated(
    how: Callable[[float, float], float],
) -> Reader:
    """A sum, difference, product or quotient."""

    def read(positions: Positions, node: fx.Node) -> Element:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
            raise UnknownError
        one, other = (as_numbers(positions.known(each)) for each in node.args)
        return result(how, one, other)

    return read


def _turned(how: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda one, other: how(other, one)


def _negative(positions: Positions, node: fx.Node) -> Element:
    return result(
        operator.mul, as_numbers(positions.known(node.args[0])), Whole((), -1)
    )


def _compared(
    how: Callable[[Any, Any], bool],
) -> Reader:
    def read(positions: Positions, node: fx.Node) -> Element:
        one, other = (as_numbers(positions.known(each)) for each in node.args[:2])
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
    **dict.fromkeys(
        ("view", "reshape", "unsqueeze", "squeeze", "_unsafe_view"), _viewed
    ),
    **dict.fromkeys(("expand", "expand_as"), _viewed),
    **dict.fromkeys(("permute", "transpose", "t", "mT"), _permuted),
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
    "slice": _sliced,
    "select": _selected,
}
"""The ops whose results are known, each with what tells the result."""
