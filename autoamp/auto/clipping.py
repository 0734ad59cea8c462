"""Lets norms of skipped steps through `clip_grad_norm_(error_if_nonfinite=True)`.

In fp32 an infinite gradient is a fault, and the script rightly raises.  In fp16 the
cause may be a loss scale that is still too high: the step is skipped, the loss scale is
lowered and all is well.  A script that asked for none of this must not fail here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoamp.training.ledger.backwards import BACKWARDS

Norm = Callable[..., Any]


def tolerating(original: Norm) -> Norm:
    """`torch.nn.utils.get_total_norm`, which lets a norm through whose step is skipped.

    An infinite norm passes where backwards since the last step have overflowed under a
    loss scale.  A loss that is infinite by itself is reported when the loss scale has
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
