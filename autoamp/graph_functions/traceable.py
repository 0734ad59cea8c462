"""Scaling at the edge of a graph, for compilers that trace the backward too.

The functions here do the arithmetic of `edge` with plain ops, which a compiler fuses
into their neighbours.  AOT autograd supports no tensor hooks inside a graph, and needs
none, because its outputs are new tensors.  AOT autograd cannot differentiate twice, so
these functions cannot either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.graph_functions.casts import (
    LowWeightUnscaled,
    low_weight_unscaled,
    scaled_result,
)
from autoamp.graph_functions.edge import (
    ScaleIn,
    UnscaleOut,
    infinities_as_nan,
    plainly_unscaled,
    scale_grad,
    scaled,
    unscale_grad,
    unscale_grad_,
)
from autoamp.graph_functions.half import unscale_half


def _leaving(grad: Tensor, inv: Tensor, found_inf: Tensor) -> Tensor:
    """`grad` unscaled and checked, with NaN for infinities.

    `edge` leaves infinities in the gradient of a leaf, but a compiler cannot tell which
    inputs are leaves.
    """
    return infinities_as_nan(plainly_unscaled(grad, inv, found_inf))


class _TracedScale(ScaleIn):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return scaled(grad, *ctx.edge), None


class _TracedScaleApart(_TracedScale):
    @staticmethod
    def forward(value: Tensor, *_: Tensor) -> Tensor:
        return value.clone()


class _TracedUnscale(UnscaleOut):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _leaving(grad, *ctx.edge), None, None


class _TracedLowWeight(LowWeightUnscaled):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wide = grad.to(ctx.dtype)
        return _leaving(wide, ctx.inv, ctx.found_inf), None, None, None


_apply_traced_scale = compat.direct_apply(_TracedScale)
_apply_traced_scale_apart = compat.direct_apply(_TracedScaleApart)
_apply_traced_low_weight = compat.direct_apply(_TracedLowWeight)
_apply_traced_unscale = compat.direct_apply(_TracedUnscale)


def traced_scale_grad(value: Tensor, loss_scale: Tensor) -> Tensor:
    """As `scale_grad`, in a form AOT autograd traces."""
    return _apply_traced_scale(value, loss_scale)


def traced_scale_grad_apart(value: Tensor, loss_scale: Tensor) -> Tensor:
    """As `traced_scale_grad`, with a result in memory of its own.

    If several results are views of one tensor, AOT autograd makes the views anew from
    the tensor outside the graph, and any op between the tensor and its views is lost.
    """
    return _apply_traced_scale_apart(value, loss_scale)


def traced_unscale_grad(
    value: Tensor, inv_loss_scale: Tensor, found_inf: Tensor
) -> Tensor:
    """As `unscale_grad`, in a form AOT autograd traces."""
    return _apply_traced_unscale(value, inv_loss_scale, found_inf)


def traced_scale_grad_(value: Tensor, loss_scale: Tensor) -> Tensor:
    """As `scale_grad`, for the final value of an input that the graph writes to.

    AOT autograd does not return such an input but writes it back outside the graph, so
    the scaling must happen in place.
    """
    # The numbers stay the same, so tensors saved for a backward are still valid.
    with compat.version_kept(value):
        return value.copy_(_apply_traced_scale_apart(value, loss_scale))


def traced_unscale_grad_(
    value: Tensor, inv_loss_scale: Tensor, found_inf: Tensor
) -> Tensor:
    """As `unscale_grad_`, in a form AOT autograd traces."""
    return value.copy_(_apply_traced_unscale(value.clone(), inv_loss_scale, found_inf))


def traced_scaled_result(value: Tensor, loss_scale: Tensor) -> Tensor:
    """As `scaled_result`, in a form AOT autograd traces."""
    return traced_scale_grad(value.to(torch.float32), loss_scale)


def traced_low_weight_unscaled(
    weight: Tensor,
    copy: Tensor,
    inv_loss_scale: Tensor,
    found_inf: Tensor,
) -> Tensor:
    """As `low_weight_unscaled`, in a form AOT autograd traces."""
    return _apply_traced_low_weight(weight, copy, inv_loss_scale, found_inf)


FOR_COMPILERS: dict[Callable[..., Any], Callable[..., Any]] = {
    scale_grad: traced_scale_grad,
    unscale_grad: traced_unscale_grad,
    unscale_half: traced_unscale_grad,
    unscale_grad_: traced_unscale_grad_,
    scaled_result: traced_scaled_result,
    low_weight_unscaled: traced_low_weight_unscaled,
}
"""Function to the function that a compiler gets in its place."""
