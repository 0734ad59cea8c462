"""Keeps `clip_grad_norm_(error_if_nonfinite=True)` from raising for skipped steps.

In fp32 an infinite gradient is a fault, and the script rightly raises.  In fp16 the
cause may be a loss scale that is still too high: then the step is skipped and the loss
scale is lowered.  A script that did not ask for loss scaling must not fail for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoamp.training.ledger.backwards import BACKWARDS

Norm = Callable[..., Any]


def tolerating(original: Norm) -> Norm:
    """`torch.nn.utils.get_total_norm`, without its error for a step that is skipped.

    No error is raised if a backward since the last step has overflowed under a loss
    scale.  A loss that is infinite in itself is reported when the loss scale has
    reached its floor.
    """

    def total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        if not isinstance(tensors, torch.Tensor):
            tensors = list(tensors)  # iterated over twice
        try:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        except RuntimeError:
            if not error_if_nonfinite or not BACKWARDS.any_overflowed():
                raise
        return original(tensors, norm_type, False, foreach)

    return total_norm
