"""Reads a call as a product of two batches of matrices: matmul, bmm, einsum."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoamp import compat
from autoamp.op_names import base_name

Dimensions = tuple[int, ...]
"""An order of a tensor's dimensions, as `permute` takes it."""


@dataclass(frozen=True)
class Product:
    """A product of matrices: `left.permute(rows) @ right.permute(columns)`, permuted.

    Attributes:
        left, right: the operands.
        of_left: the dimensions of `left` as batch, rows, inner.
        of_right: the dimensions of `right` as batch, inner, columns.
        of_result: the dimensions of that product, in the order of the result.
    """

    left: fx.Node
    right: fx.Node
    of_left: Dimensions
    of_right: Dimensions
    of_result: Dimensions

    @property
    def turned(self) -> Dimensions:
        """The dimensions of `right` as batch, columns, inner."""
        *batch, inner, columns = self.of_right
        return (*batch, columns, inner)


def is_in_order(dimensions: Dimensions) -> bool:
    """Whether to permute by `dimensions` changes nothing."""
    return dimensions == tuple(range(len(dimensions)))


def product_of(node: fx.Node) -> Product | None:
    """The product that a call computes; None where it computes none of batches."""
    if not isinstance(node.target, compat.OpOverload) or node.kwargs:
        return None
    name = base_name(node.target)
    if name in ("aten::matmul", "aten::bmm"):
        return _plain_product(*node.args[:2])
    if name == "aten::einsum" and len(node.args) == 2:
        return _of_equation(*node.args)
    return None


def _plain_product(left: Any, right: Any) -> Product | None:
    sizes = [node.meta["val"].dim() for node in (left, right)]
    if sizes[0] != sizes[1] or sizes[0] < 3:
        return None
    ordered = tuple(range(sizes[0]))
    return Product(left, right, ordered, ordered, ordered)


def _of_equation(equation: Any, operands: Any) -> Product | None:
    """The product of an equation in which each letter names one dimension."""
    if not isinstance(equation, str) or equation.count("->") != 1 or len(operands) != 2:
        return None
    given, result = equation.split("->")
    if given.count(",") != 1:
        return None
    sides = [re.findall(r"\.\.\.|[a-zA-Z]", part) for part in given.split(",")]
    values = [node.meta["val"] for node in operands]
    more = max(
        value.dim() - len(side) + 1 if "..." in side else 0
        for side, value in zip(sides, values, strict=True)
    )
    every = [*sides, re.findall(r"\.\.\.|[a-zA-Z]", result)]
    left, right, after = (_with_names(side, more) for side in every)
    if [len(left), len(right)] != [value.dim() for value in values]:
        return None  # an ellipsis stands for fewer dimensions on one side
    return _of_letters(operands, left, right, after)


def _with_names(letters: list[str], more: int) -> list[str]:
    """`letters` with a name for each of the `more` dimensions of an ellipsis."""
    rest = [f"...{i}" for i in range(more)]
    return [name for x in letters for name in (rest if x == "..." else [x])]


def _of_letters(
    operands: Sequence[fx.Node], left: list[str], right: list[str], after: list[str]
) -> Product | None:
    if any(len(set(part)) != len(part) for part in (left, right, after)):
        return None  # a diagonal
    batch = [x for x in after if x in left and x in right]
    rows, columns = ([x for x in after if x not in other] for other in (right, left))
    inner = [x for x in left if x in right and x not in after]
    if not len(rows) == len(columns) == len(inner) == 1 or not batch:
        return None
    if set(left) | set(right) != {*after, *inner}:
        return None  # a dimension of one operand alone that is summed
    product = [*batch, *rows, *columns]
    return Product(
        operands[0],
        operands[1],
        tuple(left.index(x) for x in (*batch, *rows, *inner)),
        tuple(right.index(x) for x in (*batch, *inner, *columns)),
        tuple(product.index(x) for x in after),
    )
