"""Autocast: where it stands in for our graphs, and where they meet it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoamp.dtypes import LOW_DTYPES


def under_autocast(
    model: nn.Module,
    entry: Callable[..., Any],
    low: torch.dtype,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`entry(model, *args, **kwargs)` under autocast, with fp32 results as without it.

    Used where our graphs cannot run: under `vmap` and `torch.func`, inside a module the
    user compiles as one graph, or where Dynamo captures nothing.  A caller that was
    written for fp32 results would trip over half ones.
    """
    device = next((p.device.type for p in nn.Module.parameters(model)), "cpu")
    # Without a cache: one cast per use, so that a weight's gradient is summed in fp32.
    with torch.autocast(device_type=device, dtype=low, cache_enabled=False):
        result = entry(model, *args, **kwargs)

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == low:
            return value.to(torch.float32)
        return value

    return pytree.tree_map(widen, result)


def unscaled_dtype(low: torch.dtype) -> torch.dtype:
    """The dtype for a region where nothing scales the loss.

    Gradients need the range of bf16 there.
    """
    return torch.bfloat16 if torch.is_grad_enabled() else low


def all_widened(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, widened; a list or dict stays the caller's own object.

    Unless it holds half tensors: a model may append to a list it is given.
    """

    def widen(argument: Any) -> Any:
        leaves = pytree.tree_leaves(argument)
        if all(_widened(leaf) is leaf for leaf in leaves):
            return argument
        return pytree.tree_map(_widened, argument)

    return tuple(map(widen, args)), {k: widen(v) for k, v in kwargs.items()}


def _widened(value: Any) -> Any:
    """Half tensors as fp32: an ambient autocast made them, and its region ends here."""
    if isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES.values():
        return value.to(torch.float32)
    return value
