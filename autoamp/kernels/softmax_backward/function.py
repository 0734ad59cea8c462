"""The softmax of low data, with a backward that a common gradient does not disturb."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE

_SOFTMAX = torch.ops.aten.softmax.int


class _Softmax(torch.autograd.Function):
    """`aten.softmax`, whose weights add up to 1 in the backward as well.

    With `y` the weights and `g` their gradient, the gradient of the data is
    `y * (g - sum(g * y))`.  A number that is added to all of `g` changes nothing, but
    only if the weights add up to 1: rounded to 16 bits they add up to 1 + e, and the
    gradients of a row have an error in common, `e` times that number.  Where values are
    alike, it is many times the error of the written chain.
    """

    @staticmethod
    def forward(ctx: Any, data: Tensor) -> Tensor:
        result: Tensor = _SOFTMAX(data, -1)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        weights = result.to(HIGH_DTYPE)
        weights = weights / weights.sum(-1, keepdim=True)
        return compat.softmax_gradient(grad.to(HIGH_DTYPE), weights).to(result.dtype)


_apply = compat.direct_apply(_Softmax)


def softmax(data: Tensor, dimension: int) -> Tensor:
    """`aten.softmax` over the last dimension, with truer gradients.

    Args:
        data: any shape with one dimension or more, fp16 or bf16.
        dimension: the last one.

    Returns:
        A tensor of the shape and dtype of `data`.

    Example:
        >>> softmax(torch.zeros(1, 4, dtype=torch.bfloat16), -1)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]], dtype=torch.bfloat16)
    """
    assert dimension in (-1, data.dim() - 1)
    return _apply(data) if torch.is_grad_enabled() else _SOFTMAX(data, dimension)
