"""What runs where our graphs cannot: the model's own code under `torch.autocast`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


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
