"""What is asked of any optimizer, and of the arguments its step is called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


def params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """What `optimizer` optimizes now: groups may be added at any time."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def closure_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step, or None."""
    found: Callable[[], Any] | None = args[0] if args else kwargs.get("closure")
    return found
