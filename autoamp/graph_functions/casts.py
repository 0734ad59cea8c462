"""Casts that one ATen op cannot do: with fp32 gradient sums, scaling or saturation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.graph_functions.edge import leaving, passed_on, scale_inside_grad


class _LowWeight(torch.autograd.Function):
    """Forward: the low-precision copy.  Backward: the gradient, in the weight's dtype.

    Each *use* of a weight has one autograd node.  A single cast shared by all uses
    would have its gradients summed in low precision: 1000 uses of a weight whose true
    gradient is 1000 give 256 in bf16.  With one node per use the sum is in fp32.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype, ctx.plain = weight.dtype, weight.is_contiguous()
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return as_the_weight(grad, ctx), None


def as_the_weight(grad: Tensor, ctx: Any) -> Tensor:
    """A low weight's gradient in the weight's dtype and layout.

    A convolution with the channels last gives its weight such a gradient as well.  CPUs
    permute and convert in two passes sooner than in one: 1.2 instead of 1.8 ms for 512
    filters of 3 x 3 over 512 channels.
    """
    if not ctx.plain:
        return grad.to(ctx.dtype)
    if grad.is_cpu:
        grad = grad.contiguous()
    return grad.to(ctx.dtype, memory_format=torch.contiguous_format)


class LowWeightUnscaled(torch.autograd.Function):
    """`_LowWeight` whose gradient leaves the graph and is unscaled: see `edge`."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        copy: Tensor,
        inv: Tensor,
        found_inf: Tensor,
    ) -> Tensor:
        ctx.dtype, ctx.inv, ctx.found_inf = weight.dtype, inv, found_inf
        ctx.plain = weight.is_contiguous()
        ctx.is_leaf = weight.is_leaf
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wide = leaving(as_the_weight(grad, ctx), ctx.inv, ctx.found_inf)
        if not ctx.is_leaf:
            wide = passed_on(wide, ctx.found_inf)
        return wide, None, None, None


_apply_low_weight = compat.direct_apply(_LowWeight)


def low_weight(weight: Tensor, copy: Tensor) -> Tensor:
    """One use of `weight` (fp32, any shape) through `copy`, its low-precision copy.

    The result has the shape and dtype of `copy`; its gradient flows to `weight` in
    fp32, and none flows to `copy`.
    """
    if _autograd_casts(weight, copy):
        return compat.seen_as(weight, copy)
    return _apply_low_weight(weight, copy)


def _autograd_casts(weight: Tensor, copy: Tensor) -> bool:
    """Whether autograd itself can cast the gradient of a use of `weight`.

    It gives the gradient no other layout; that of a convolution may need one.
    """
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and type(weight) in _PLAIN
        and weight.dim() < _CONVOLUTIONS
        and weight.stride() == copy.stride()
        and compat.casts_gradients()
    )


_CONVOLUTIONS = 4
"""The least number of dimensions of a weight whose channels may be last."""


_PLAIN = (torch.nn.Parameter, Tensor)
"""Kinds of tensors whose memory may be another's: a sharded one has none of its own."""


class _LowUses(torch.autograd.Function):
    """Forward: a low copy, several times.  Backward: one fp32 sum of the gradients.

    Autograd would sum the gradients in the copy's own dtype.  For a value that eight
    products read, the sum would have more than 1.5 times the error of torch.autocast,
    which casts for each product (tests/analyse/test_ceiling.py).
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, copy: Tensor, uses: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = value.dtype
        return tuple(copy.detach() for _ in range(uses))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        total: Tensor | None = None
        for grad in grads:
            if grad is not None:
                total = grad.to(ctx.dtype) if total is None else total.add_(grad)
        return total, None, None


_apply_low_uses: Any = compat.direct_apply(_LowUses)


def low_uses(value: Tensor, copy: Tensor, uses: int) -> tuple[Tensor, ...]:
    """Several uses of `value` (fp32, any shape) through `copy`, its low-precision copy.

    Each of the `uses` results has the shape and dtype of `copy`.  The gradients of the
    results are summed in fp32 and flow to `value`, none to `copy`.  All gradients are
    kept until the last one arrives: for a weight, or many uses, `low_weight` is better.
    """
    result: tuple[Tensor, ...] = _apply_low_uses(value, copy, uses)
    return result


_apply_low_weight_unscaled = compat.direct_apply(LowWeightUnscaled)


def low_weight_unscaled(
    weight: Tensor,
    copy: Tensor,
    inv_loss_scale: Tensor,
    found_inf: Tensor,
) -> Tensor:
    """`low_weight` whose gradient is also unscaled and checked, in fp32, in one kernel.

    Args:
        weight, copy: as for `low_weight`; `copy` is in another dtype than `weight`.
        inv_loss_scale: 1/S, 0-dim fp32.
        found_inf: one fp32 element, set to 1 where the gradient is not finite.
    """
    return _apply_low_weight_unscaled(weight, copy, inv_loss_scale, found_inf)


class _ScaledResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, loss_scale: Tensor) -> Any:
        ctx.dtype, ctx.loss_scale = value.dtype, loss_scale
        return value.to(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        if torch.is_grad_enabled():  # create_graph=True
            return scale_inside_grad(grad, ctx.loss_scale).to(ctx.dtype), None
        return _scaled_and_rounded(grad, ctx.loss_scale, ctx.dtype), None


_PIECE = 2**18
"""The number of elements of an fp32 product that fits in a core's cache."""


def _scaled_and_rounded(grad: Tensor, loss_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad` (fp32) times `loss_scale` in `dtype`, computed in fp32 and rounded once.

    The fp32 product is never in memory as a whole, because the gradient of the logits
    is the largest tensor of many training steps.  A GPU kernel rounds as it writes.  A
    CPU kernel makes the product first, which is far slower than the cast alone unless
    the product is cut in pieces.
    """
    if compat.needs_plain_ops(grad):
        return (grad * loss_scale).to(dtype)
    if compat.is_distributed(grad):
        part = _scaled_and_rounded(compat.own_memory(grad), loss_scale, dtype)
        return compat.with_memory(grad, part)
    low = torch.empty_like(grad, dtype=dtype)
    if grad.device.type != "cpu" or grad.numel() <= _PIECE:
        return torch.mul(grad, loss_scale, out=low)
    if not (grad.is_contiguous() and low.is_contiguous()):
        return low.copy_(grad * loss_scale)
    pieces = zip(low.view(-1).split(_PIECE), grad.view(-1).split(_PIECE), strict=True)
    for piece, wide in pieces:
        piece.copy_(wide * loss_scale)
    return low


_apply_scaled_result = compat.direct_apply(_ScaledResult)


def scaled_result(value: Tensor, loss_scale: Tensor) -> Tensor:
    """`value` (low precision, any shape) in fp32, to be returned from the graph.

    The gradient is multiplied by `loss_scale` (0-dim fp32) as it enters the graph, and
    only then rounded: the backward of `scale_grad` of a cast, in one kernel.
    """
    return _apply_scaled_result(value, loss_scale)


def saturating_cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in `dtype`, with finite numbers clamped to the range of `dtype`.

    A mask filled with `torch.finfo(torch.float32).min` would become -inf in fp16 *and*
    in bf16 (whose largest number is a little below fp32's), and a row that is all -inf
    makes softmax NaN.  NaN and infinities that `value` already holds stay.
    """
    limit = torch.finfo(dtype).max
    clamped = value.clamp(-limit, limit)
    return torch.where(value.isinf(), value, clamped).to(dtype)
