"""Gradient norms that must be finite: `clip_grad_norm_(error_if_nonfinite=True)`.

In fp32 an infinite gradient is a fault, and the script rightly raises.  In fp16 it may
be a loss scale that is still finding its place: the step is skipped, the scale lowered
and all is well.  A script that asked for none of this shall not fail for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoamp.scaling.backwards import BACKWARDS

Norm = Callable[..., Any]


def tolerating(original: Norm) -> Norm:
    """`torch.nn.utils.get_total_norm`, which lets a norm through whose step is skipped.

    Where backwards since the last step have overflowed under a loss scale.  A loss that
    is infinite by itself is told when the scale has reached its floor.
    """

    def total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        if not isinstance(tensors, torch.Tensor):
            tensors = list(tensors)  # asked twice
        try:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        except RuntimeError:
            if not error_if_nonfinite or not BACKWARDS.any_overflowed():
                raise
        return original(tensors, norm_type, False, foreach)

    return total_norm
