"""Norms for CPUs, where torch's own are slow or not true.

Torch 2.13 has one kernel for `aten::rms_norm` on GPUs.  On CPUs the op is five kernels,
its backward is about twenty, and five tensors of the data's size are kept for it.

Torch's kernels of `aten::layer_norm` on CPUs lose the digits of low rows whose numbers
are alike, and sum the gradients of weight and bias over the rows in the dtype of the
data: 512 instead of 16000 in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.kernels.cpu_norms.function.layer_norm import apply_layer_norm

_ATEN = torch.ops.aten


class _RmsNorm(torch.autograd.Function):
    """`x * r * weight`, where `r = (mean(x ** 2) + epsilon) ** -0.5` for each row.

    With `g` the gradient of the result, `d` the length of a row and
    `c = sum(g * weight * x)` over the row, the gradient of `x` is
    `r * g * weight - x * r ** 3 * c / d`, and that of `weight` is the sum over the rows
    of `g * x * r`.  Kept for the backward: `x`, and one number for each row.

    The backward of a layer norm, told that the mean of each row is 0, is the same but
    for `- r * sum(g * weight) / d` in the gradient of `x`, which is added again: half
    the passes over memory that the formulas take one by one.
    """

    @staticmethod
    def forward(
        ctx: Any, data: Tensor, weight: Tensor | None, epsilon: float
    ) -> Tensor:
        wide = data.to(HIGH_DTYPE).contiguous()  # as torch's op lays its result out
        size = data.shape[-1]
        squares = torch.linalg.vecdot(wide, wide).unsqueeze(-1)
        scale = torch.rsqrt(squares / size + epsilon)
        result = wide * scale
        if weight is not None:
            result *= weight
        ctx.again = lambda x, w: _ATEN.rms_norm.default(x, [size], w, epsilon)
        ctx.save_for_backward(data, weight, scale)
        return result.to(data.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        data, weight, scale = ctx.saved_tensors
        if compat.needs_plain_ops(grad):
            found = compat.gradients_by_torch(ctx.again, grad, (data, weight))
            return (*found, None)
        grad, wide, size = grad.to(HIGH_DTYPE), data.to(HIGH_DTYPE), data.shape[-1]
        given = None if weight is None else weight.to(HIGH_DTYPE)
        needed = [True, weight is not None, False]
        of_data, of_weight, _ = _ATEN.native_layer_norm_backward.default(
            grad, wide, [size], torch.zeros_like(scale), scale, given, None, needed
        )
        ones = wide.new_ones(size) if given is None else given
        shift = grad.reshape(-1, size).mv(ones).view_as(scale)
        of_data.add_(shift.mul_(scale).div_(size))
        if weight is not None:
            of_weight = of_weight.to(weight.dtype)
        return of_data.to(data.dtype), of_weight, None


_apply_rms_norm = compat.direct_apply(_RmsNorm)


def rms_norm(
    data: Tensor,
    sizes: Sequence[int],
    weight: Tensor | None = None,
    epsilon: float | None = None,
) -> Tensor:
    """`aten.rms_norm` over the last dimension, computed in fp32 inside.

    Args:
        data: any shape with one dimension or more, fp32, fp16 or bf16.
        sizes: the length of the last dimension.
        weight: one number for each element of a row, in fp32 or in the dtype of `data`.
        epsilon: by default the step of fp32 above 1, as in torch, also for low data.

    Returns:
        A tensor of the shape and dtype of `data`.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), [2], epsilon=0.0)
        tensor([[0.8485, 1.1314]])
    """
    assert len(sizes) == 1
    if epsilon is None:
        epsilon = torch.finfo(HIGH_DTYPE).eps
    return _apply_rms_norm(data, weight, epsilon)


def layer_norm(  # noqa: PLR0917 - as torch's op
    data: Tensor,
    sizes: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001
) -> Tensor:
    """`aten.layer_norm` of low data, with gradients of its parameters that are true.

    Args:
        data: any shape that ends with `sizes`, in bf16 or fp16.
        sizes: the sizes of the last dimensions, which are normalised together.
        weight, bias: of shape `sizes`, in fp32 or in the dtype of `data`.

    Returns:
        A tensor of the shape and dtype of `data`.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16), [2])
        tensor([[-1.,  1.]], dtype=torch.bfloat16)
    """
    return apply_layer_norm(data, weight, bias, sizes, epsilon)


OWN_NORMS: dict[Any, Callable[..., Tensor]] = {
    _ATEN.layer_norm.default: layer_norm,
    _ATEN.rms_norm.default: rms_norm,
}
"""Torch's op to the function that does the same on a CPU."""
