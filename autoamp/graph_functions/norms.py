"""A root-mean-square norm for CPUs, where torch computes it op by op.

Torch 2.13 has one kernel for `aten::rms_norm` on GPUs.  On CPUs the op is five kernels,
its backward is about twenty, and five tensors of the data's size are kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE


class _RmsNorm(torch.autograd.Function):
    """`x * r * weight`, where `r = (mean(x ** 2) + epsilon) ** -0.5` for each row.

    With `g` the gradient of the result, `d` the length of a row and
    `c = sum(g * weight * x)` over the row, the gradient of `x` is
    `r * g * weight - x * r ** 3 * c / d`, and that of `weight` is the sum over the rows
    of `g * x * r`.  Kept for the backward: `x`, and one number for each row.
    """

    @staticmethod
    def forward(
        ctx: Any, data: Tensor, weight: Tensor | None, epsilon: float
    ) -> Tensor:
        wide = data.to(HIGH_DTYPE).contiguous()  # as torch's op lays its result out
        scale = _scale(wide, epsilon)
        result = wide * scale
        if weight is not None:
            result *= weight
        ctx.epsilon = epsilon
        ctx.save_for_backward(data, weight, scale)
        return result.to(data.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        data, weight, scale = ctx.saved_tensors
        wide, grad = data.to(HIGH_DTYPE), grad.to(HIGH_DTYPE)
        if torch.is_grad_enabled():  # the backward is itself differentiated
            of_data, of_weight = _gradients(wide, weight, grad, ctx.epsilon)
        else:
            of_data, of_weight = _gradients_once(wide, weight, grad, scale)
        dtype = data.dtype
        if weight is not None:
            of_weight = of_weight.to(weight.dtype)
        return (
            of_data.to(dtype) if ctx.needs_input_grad[0] else None,
            of_weight if ctx.needs_input_grad[1] else None,
            None,
        )


def _scale(data: Tensor, epsilon: float) -> Tensor:
    squares = torch.linalg.vecdot(data, data).unsqueeze(-1)
    return torch.rsqrt(squares / data.shape[-1] + epsilon)


def _gradients(
    data: Tensor, weight: Tensor | None, grad: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The gradients of data and weight, by ops that autograd records."""
    scale = _scale(data, epsilon)
    of_weight = (grad * data * scale).flatten(0, -2).sum(0)
    weighted = grad if weight is None else grad * weight
    shared = (weighted * data).sum(-1, keepdim=True) / data.shape[-1]
    return weighted * scale - data * scale.pow(3) * shared, of_weight


def _gradients_once(
    data: Tensor, weight: Tensor | None, grad: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of data and weight, with two passes over memory fewer than above.

    Both sums over `grad * data` are products of a matrix and a vector.
    """
    size = data.shape[-1]
    both = (grad * data).reshape(-1, size)
    of_weight = scale.reshape(-1) @ both
    ones = data.new_ones(size) if weight is None else weight.to(HIGH_DTYPE)
    shared = (both @ ones).view_as(scale)
    of_data = grad * scale if weight is None else (grad * weight).mul_(scale)
    return of_data.addcmul_(data, scale.pow(3).mul_(shared), value=-1 / size), of_weight


def own_kernels(gm: fx.GraphModule) -> None:
    """Puts `rms_norm` in the place of torch's op in `gm` and the graphs inside `gm`.

    Only where the op is on a CPU and over the last dimension alone; for graphs that run
    without a compiler, since a compiler makes a kernel of its own.
    """
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        target = torch.ops.aten.rms_norm.default
        for node in module.graph.find_nodes(op="call_function", target=target):
            value = node.meta.get("val")
            on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
            if on_cpu and len(node.args[1]) == 1:
                node.target = rms_norm
        module.recompile()


_apply = compat.direct_apply(_RmsNorm)


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
        epsilon: by default what a number of the dtype of `data` is apart from 1.

    Returns:
        A tensor of the shape and dtype of `data`.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), [2], epsilon=0.0)
        tensor([[0.8485, 1.1314]])
    """
    assert len(sizes) == 1
    if epsilon is None:
        epsilon = torch.finfo(data.dtype).eps
    result: Tensor = _apply(data, weight, epsilon)
    return result
