"""Sizes of tensors, known or symbolic, without a guard on any of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.kernels.shared.positions.statements import Size


def size_of(value: Any) -> Size | None:
    """A size as an int or an expression, of an argument or a dimension; else None."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.SymInt):
        return compat.expression(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def shape_of(node: fx.Node) -> list[Size]:
    """The sizes of a tensor."""
    return [size_of(size) for size in node.meta["val"].shape]
