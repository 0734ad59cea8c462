"""Finds and changes the batch size of a call's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoamp.ask.stand_in import Call
from autoamp.errors import OptionError


def batch_size(call: Call) -> int | None:
    """The size of dimension 0 of the first tensor that has one, or None."""
    for leaf in pytree.tree_leaves(call):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    return None


def token_count(call: Call) -> int | None:
    """The elements of the first matrix of integers among the arguments, or None."""
    for leaf in pytree.tree_leaves(call):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and _is_integer(leaf.dtype):
            return leaf.numel()
    return None


def resized(call: Call, size: int) -> Call:
    """The arguments with another number of samples; their samples are repeated.

    Every tensor whose dimension 0 has the size of the batch is resized.

    Raises:
        OptionError: no argument has a batch dimension, or `size` is less than 1.
    """
    now = batch_size(call)
    if not now:
        raise OptionError("no argument of the call is a tensor with a batch dimension")
    if size < 1:
        raise OptionError(f"batch size {size} is too small: give a number above 0")

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != now:
            return value
        order = torch.arange(size, dtype=torch.int64, device=value.device) % now
        return value.detach()[order].requires_grad_(value.requires_grad)

    sized: Call = pytree.tree_map(resize, call)
    return sized


def _is_integer(dtype: torch.dtype) -> bool:
    return dtype in (torch.int64, torch.int32, torch.int16)
