"""Unscales the gradient of a half-precision input where it leaves the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.graph_functions.edge import leaving, unscale_grad


class _HalfLeafUnscaled(torch.autograd.Function):
    """Forward: an alias.  Backward: the gradient in fp32, unscaled and checked.

    A tensor hook has to keep the gradient's half dtype, in which the unscaled gradient
    underflows.  This Function may return fp32: autograd takes the fp32 gradient if the
    leaf's `grad_dtype` is fp32, and otherwise casts the gradient itself.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, inv: Tensor, found_inf: Tensor) -> Tensor:
        ctx.inv, ctx.found_inf = inv, found_inf
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return leaving(grad.float(), ctx.inv, ctx.found_inf), None, None


_apply_half_leaf_unscaled = compat.direct_apply(_HalfLeafUnscaled)


def unscale_half(value: Tensor, inv_loss_scale: Tensor, found_inf: Tensor) -> Tensor:
    """One use of `value` (fp16 or bf16); its gradient is unscaled, in fp32 for a leaf.

    Args:
        value: any shape; for a leaf, one node per use makes the gradient sum fp32.
        inv_loss_scale: 1/S, 0-dim fp32.
        found_inf: one fp32 element, set to 1 where the gradient is not finite.
    """
    if not value.is_leaf:
        return unscale_grad(value, inv_loss_scale, found_inf)
    return _apply_half_leaf_unscaled(value, inv_loss_scale, found_inf)
