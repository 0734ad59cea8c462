"""Reads one call of a graph: the name of its op, its dtype, its sizes and strides."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.op_names import base_name
from autoamp.rules import family


def name_of(node: fx.Node) -> str:
    """The name of the op that is called, such as `aten::add`; empty for no op."""
    is_op = isinstance(node.target, compat.OpOverload)
    return base_name(node.target) if is_op else ""


def is_of(node: fx.Node, ops: Collection[str]) -> bool:
    """Whether one of `ops`, given by their names, is called."""
    return name_of(node) in ops


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of a tensor; None for any other value."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def is_cast(node: fx.Node) -> bool:
    """Whether a call is the user's cast from fp32 to fp32, which changes nothing."""
    return is_of(node, family("cast")) and all(
        dtype_of(n) == HIGH_DTYPE for n in (node, *node.all_input_nodes)
    )


def sizes_of(tensor: torch.Tensor) -> tuple[int | str, ...]:
    """The shape; symbolic sizes as text, since to compare them would add guards."""
    return tuple(s if isinstance(s, int) else str(s) for s in tensor.shape)


def layout_of(tensor: torch.Tensor) -> tuple[int | str, ...]:
    """The shape and strides; symbolic ones as text, as for `sizes_of`."""
    every = (*tensor.shape, *tensor.stride())
    return tuple(s if isinstance(s, int) else str(s) for s in every)
