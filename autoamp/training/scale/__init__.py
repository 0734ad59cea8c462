"""Loss scales: the factor on the gradients inside a graph, and how the factor moves."""

from __future__ import annotations

from typing import Any

import torch

from autoamp.dtypes import needs_loss_scale
from autoamp.errors import LossScaleError
from autoamp.training.scale.base import (
    INIT_SCALE,
    LossScale,
    NoLossScale,
    StaticLossScale,
)
from autoamp.training.scale.dynamic import MIN_SCALE, DynamicLossScale

LOSS_SCALES = ("auto", "dynamic", "off")
"""Names of loss scales; a number or a `LossScale` may be given as well."""


def resolve_loss_scale(given: Any, low: torch.dtype) -> LossScale:
    """The loss scale `convert(loss_scale=given)` means for compute dtype `low`.

    "auto" is dynamic for fp16 and none for bf16, whose range is fp32's.

    Raises:
        LossScaleError: `given` is none of "auto", "dynamic", "off", a positive number
            and a `LossScale`.
    """
    if isinstance(given, LossScale):
        return given
    if given == "auto":
        given = "dynamic" if needs_loss_scale(low) else "off"
    if given == "dynamic":
        return DynamicLossScale()
    if given == "off":
        return NoLossScale()
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return StaticLossScale(given)
    raise LossScaleError(
        f"loss_scale={given!r} is unknown; give 'auto', 'dynamic', 'off', a positive "
        "number, or a DynamicLossScale, StaticLossScale or NoLossScale"
    )
