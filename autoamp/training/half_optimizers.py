"""Which optimizers train half-precision weights, asked before any of them steps.

The automatic mode asks it while no model is hot: only torch is imported here.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_HALF = (torch.float16, torch.bfloat16)

_whole: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""Optimizers of no half-precision weight: how many groups, and the first dtype."""


def trains_half(optimizer: Any) -> bool:
    """Whether an optimizer trains half-precision weights.

    An optimizer without such weights is looked at again when it is given a group, or
    when the dtype of its first weight has changed.
    """
    groups = optimizer.param_groups
    first = groups[0]["params"] if groups else ()
    stamp = len(groups), first[0].dtype if first else None
    if _whole.get(optimizer) == stamp:
        return False
    half = [p for group in groups for p in group["params"] if p.dtype in _HALF]
    if not half:
        _whole[optimizer] = stamp
    return any(p.requires_grad for p in half)
