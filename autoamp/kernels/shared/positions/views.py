"""What views of tensors made of sizes and numbers hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

from autoamp.kernels.shared.positions.elements import UnknownError, replaced, shown
from autoamp.kernels.shared.positions.sizes import shape_of, size_of
from autoamp.kernels.shared.positions.statements import Element, Size, Statement, Whole
from autoamp.op_names import base_name


class Positions(Protocol):
    """What is known of the operands (`reading.Positions`)."""

    def known(self, value: Any) -> Element:
        """What a tensor holds, or the number that an argument is, or an error."""

    def numbers(self, value: Any, dtype: torch.dtype) -> Element:
        """As `known`, as a kernel reads it that computes in `dtype`; 1 for True."""

    def statement(self, value: Any) -> Statement:
        """What bools say, or where numbers are not 0."""


Reader = Callable[[Positions, fx.Node], Element]


def argument(node: fx.Node, at: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by position or by name."""
    return node.args[at] if len(node.args) > at else node.kwargs.get(name, default)


def known_size(value: Any) -> Size:
    """A size, or an error."""
    found = size_of(value)
    if found is None:
        raise UnknownError
    return found


def _viewed(positions: Positions, node: fx.Node) -> Element:
    """A view with the same sizes but for those that are 1, or an expansion."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = shape_of(source), shape_of(node)
    order: list[int | None] = [None] * len(after)
    name = base_name(node.target).removeprefix("aten::")
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
    name = base_name(node.target).removeprefix("aten::")
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
    dimension = int(argument(node, 1, "dim", 0)) % rank
    if argument(node, 4, "step", 1) != 1:
        raise UnknownError
    start = argument(node, 2, "start")
    start = 0 if start is None else known_size(start)
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
    dimension, at = int(node.args[1]) % len(sizes), known_size(node.args[2])  # type: ignore[arg-type]
    if not isinstance(at, int) or at < 0:
        raise UnknownError
    order = [d for d in range(len(sizes)) if d != dimension]
    return shown(positions.known(source), len(sizes), order, {dimension: at})


def _indexed(positions: Positions, node: fx.Node) -> Element:
    """Elements taken by one tensor of positions for each dimension."""
    source, indices = node.args[:2]
    assert isinstance(source, fx.Node)
    rank = len(shape_of(source))
    if len(indices) != rank:  # type: ignore[arg-type]
        raise UnknownError
    taken: dict[int, Whole] = {}
    for at, index in enumerate(indices):  # type: ignore[arg-type]
        found = positions.known(index)
        if index.meta["val"].dtype == torch.uint8:
            raise UnknownError  # a mask, not positions
        if not isinstance(found, Whole) or not _counts_up(found):
            raise UnknownError  # a number below 0 counts from the end
        taken[at - rank] = found
    return replaced(positions.known(source), taken)


def _counts_up(whole: Whole) -> bool:
    is_int = isinstance(whole.number, int) and whole.number >= 0
    return is_int and all(factor > 0 for _, factor in whole.factors)


def _repeated(positions: Positions, node: fx.Node) -> Element:
    """A tensor repeated along dimensions of size 1."""
    source, times = node.args[:2]
    assert isinstance(source, fx.Node)
    before, after = shape_of(source), shape_of(node)
    new = len(after) - len(before)
    for size, count in zip(before, times[new:], strict=True):  # type: ignore[index, arg-type]
        if size != 1 and not (isinstance(count, int) and count == 1):
            raise UnknownError
    order: list[int | None] = [*[None] * new, *range(len(before))]
    return shown(positions.known(source), len(before), order)


VIEWS: dict[str, Reader] = {
    **dict.fromkeys(
        ("view", "reshape", "unsqueeze", "squeeze", "_unsafe_view"), _viewed
    ),
    **dict.fromkeys(("expand", "expand_as"), _viewed),
    **dict.fromkeys(("permute", "transpose", "t", "mT"), _permuted),
    "index": _indexed,
    "repeat": _repeated,
    "select": _selected,
    "slice": _sliced,
}
"""The ops that show parts of a tensor, each with the function that tells the part."""
