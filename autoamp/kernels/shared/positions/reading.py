"""Reads the elements of tensors that a graph makes of sizes and numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.kernels.shared.constants import written_storages
from autoamp.kernels.shared.positions.elements import UnknownError, in_dtype
from autoamp.kernels.shared.positions.readers import READERS
from autoamp.kernels.shared.positions.sizes import shape_of, size_of
from autoamp.kernels.shared.positions.statements import (
    FAILS,
    HOLDS,
    Choice,
    Element,
    Statement,
    Whole,
    chosen,
    is_zero,
    opposite,
)
from autoamp.op_names import base_name


class Positions:
    """What the tensors of a graph hold, as far as it follows from positions.

    Nothing is said of a tensor that some call writes to.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._written = written_storages(graph.nodes)
        self._known: dict[fx.Node, Element | None] = {}

    def of(self, value: Any) -> Element | None:
        """What a tensor holds, or the number that an argument is; None if unknown."""
        if not isinstance(value, fx.Node):
            return _of_number(value)
        if value not in self._known:
            self._known[value] = self._read(value)
        return self._known[value]

    def is_never_written(self, node: fx.Node) -> bool:
        """Whether no call of the graph writes to a tensor."""
        return compat.storage_id(node.meta["val"]) not in self._written

    def _read(self, node: fx.Node) -> Element | None:
        size = size_of(node)
        if size is not None:
            return Whole((), size)
        if not isinstance(node.target, compat.OpOverload):
            return None
        name, value = (
            base_name(node.target).removeprefix("aten::"),
            node.meta.get("val"),
        )
        if name not in READERS or not isinstance(value, Tensor):
            return None
        if compat.storage_id(value) in self._written:
            return None
        try:
            found = READERS[name](self, node)
            return in_dtype(found, value.dtype, shape_of(node))
        except (UnknownError, IndexError, OverflowError, ZeroDivisionError):
            return None

    def known(self, value: Any) -> Element:
        """As `of`; an error where nothing is known."""
        found = self.of(value)
        if found is None:
            raise UnknownError
        return found

    def numbers(self, value: Any, dtype: torch.dtype) -> Element:
        """As `known`, as a kernel reads it that computes in `dtype`; 1 for True."""
        is_tensor = isinstance(value, fx.Node) and size_of(value) is None
        sizes = shape_of(value) if is_tensor else []
        dtype = torch.int64 if dtype == torch.bool else dtype
        return in_dtype(self.known(value), dtype, sizes)

    def statement(self, value: Any) -> Statement:
        """What bools say, or where numbers are not 0."""
        found = self.known(value)
        if isinstance(found, Choice):
            return chosen(found.where, bool(found.number), bool(found.otherwise))
        if isinstance(found, float):
            return HOLDS if found else FAILS
        return opposite(is_zero(found)) if isinstance(found, Whole) else found


def _of_number(value: Any) -> Element | None:
    if isinstance(value, bool):
        return HOLDS if value else FAILS
    if isinstance(value, int):
        return Whole((), value)
    return value if isinstance(value, float) else None
