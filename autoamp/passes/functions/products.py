"""A product of low tensors that keeps the fp32 sums of its kernels.

Every kernel that multiplies 16-bit numbers sums in fp32 and rounds each sum as it
writes.  Where the readers of a product all read fp32, a cast widens the rounded numbers
again; so does the cast of a weight's gradient.  `product` has the kernel write its sums
as they are: one rounding less and one kernel less.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.passes.functions.casts import (
    low_weight,
    low_weight_unscaled,
    scaled_and_rounded,
    scaled_result,
)
from autoamp.passes.functions.edge import leaving, multiplied_again

Edge = tuple[Tensor, Tensor]
"""The inverse of a loss scale, and the flag for overflows, as in `edge.py`."""


def _sums(one: Tensor, other: Tensor, *, plain: bool = False) -> Tensor:
    """The product of two low matrices, or of two batches of matrices, in fp32.

    Args:
        plain: whether the product is to be made of ops that can be differentiated, and
            that torch's transforms know: torch has no derivative of the others.
    """
    # Tensors without memory stand for a GPU's: graphs for CPUs call no `product`.
    on_gpu = one.is_cuda or one.is_meta or isinstance(one, compat.FakeTensor)
    if on_gpu and compat.products_give_fp32() and not plain:
        multiply: Any = torch.mm if one.dim() == 2 else torch.bmm
        result: Tensor = multiply(one, other, out_dtype=HIGH_DTYPE)
        return result
    # 16 bits are exact in fp32, and so is the product of two such numbers: 8 digits of
    # bf16 or 11 of fp16 make 22 at most, and fp32 has 24.  The sum alone is rounded.
    dtype = torch.promote_types(one.dtype, HIGH_DTYPE)  # a check has float64
    with compat.autocast_off():
        return one.to(dtype) @ other.to(dtype)


def _rows(value: Tensor) -> Tensor:
    """`value` as a matrix; a vector is one row."""
    return value.reshape(math.prod(value.shape[:-1]), value.shape[-1])


def _computed(
    data: Tensor, factor: Tensor, bias: Tensor | None, *, turned: bool, wide: bool
) -> Tensor:
    """The product itself; the arguments are those of `product`, all of them low."""
    if wide and compat.transforms_active():
        return _sums(data, factor.transpose(-2, -1) if turned else factor, plain=True)
    if wide and factor.dim() > 2:
        made = _sums(data.flatten(0, -3), factor.flatten(0, -3))
        shape = (*data.shape[:-1], factor.shape[-1])
    elif wide:
        made = _sums(_rows(data), factor.t() if turned else factor)
        shape = (*data.shape[:-1], made.shape[-1])
    elif turned:
        made = functional.linear(data, factor, bias)
        shape = made.shape
    else:
        made = data @ factor if bias is None else torch.addmm(bias, data, factor)
        shape = made.shape
    # Nobody could write to a result that is a view made inside a Function.
    is_whole = made.shape == shape and compat.whole(made) is made
    return made if is_whole else torch.ops.aten._unsafe_view.default(made, shape)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        data: Tensor,
        weight: Tensor,
        copy: Tensor | None,
        bias: Tensor | None,
        bias_copy: Tensor | None,
        turned: bool,
        wide: bool,
        loss_scale: Tensor | None,
        edge: Edge | None,
    ) -> Tensor:
        factor = weight if copy is None else copy
        needs_data, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(
            data if needs_weight else None, factor if needs_data else None
        )
        ctx.is_batch, ctx.dtype = factor.dim() > 2, factor.dtype
        # Not saved: a saved weight must stay as it is until the backward, and none but
        # a backward that is differentiated again asks for it.
        ctx.weight = weight if copy is not None and weight.requires_grad else None
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.has_bias_copy = bias_copy is not None
        ctx.turned, ctx.loss_scale, ctx.edge = turned, loss_scale, edge
        given = bias if bias_copy is None else bias_copy
        return _computed(data, factor, given, turned=turned, wide=wide)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        data, factor = ctx.saved_tensors
        plain = compat.needs_plain_ops(grad)
        # The gradient of the result in the operands' dtype, times the loss scale.
        if ctx.loss_scale is None:
            grad = grad.to(ctx.dtype)
        elif torch.is_grad_enabled():  # create_graph=True
            grad = multiplied_again(grad, ctx.loss_scale).to(ctx.dtype)
        else:
            grad = scaled_and_rounded(grad, ctx.loss_scale, ctx.dtype)
        # With y = x @ w and the gradient g of y, that of x is g @ w.T, that of w is
        # x.T @ g, and that of a bias is the sum of the rows of g.  With y = x @ w.T the
        # first two are g @ w and g.T @ x.
        needs_data, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
        of_data = of_weight = of_bias = None
        if needs_data:
            if torch.is_grad_enabled() and ctx.weight is not None:
                factor = low_weight(ctx.weight, factor)
            of_data = grad @ (factor if ctx.turned else factor.transpose(-2, -1))
        if needs_weight and ctx.is_batch:
            of_weight = data.transpose(-2, -1) @ grad
        elif needs_weight:
            one, other = (grad, data) if ctx.turned else (data, grad)
            one, other = _rows(one).t(), _rows(other)
            if ctx.weight is None:
                of_weight = one @ other
            else:
                of_weight = _of_weight(_sums(one, other, plain=plain), ctx)
        if needs_bias:
            of_bias = _rows(grad).sum(0, dtype=ctx.bias_dtype)
            if ctx.has_bias_copy:
                of_bias = _of_weight(of_bias, ctx)
        return of_data, of_weight, None, of_bias, *(None,) * 5


def _of_weight(wide: Tensor, ctx: Any) -> Tensor:
    """The gradient of a weight, or of a bias, unscaled and checked if it leaves."""
    if ctx.edge is None:
        return wide
    return leaving(wide, *ctx.edge)


_apply_product = compat.direct_apply(_Product)


def product(
    data: Tensor,
    weight: Tensor,
    copy: Tensor | None = None,
    bias: Tensor | None = None,
    bias_copy: Tensor | None = None,
    *,
    turned: bool = False,
    wide: bool = False,
    loss_scale: Tensor | None = None,
    edge: Edge | None = None,
) -> Tensor:
    """`data @ weight + bias` of low numbers, which rounds no sum that is read in fp32.

    Args:
        data: low, (..., n).
        weight: (n, m), or (m, n) where it is `turned`; or low and (..., n, m) with the
            leading sizes of `data`, which is (..., k, n) then.
        copy: the low numbers of `weight`, which is fp32 then and gets an fp32 gradient;
            by default `weight` is low itself, and so is its gradient.
        bias, bias_copy: (m,), as `weight` and `copy`; a wide product has none.
        wide: whether the result is fp32; it is low otherwise.
        loss_scale: 0-dim fp32; multiplies the gradient of a wide result.
        edge: 1/S and found_inf as for `low_weight_unscaled`, by which the gradients of
            fp32 weights are unscaled and checked.

    Returns:
        A tensor (..., m), or (..., k, m).

    Example:
        >>> one = torch.tensor([[1.0, 2**-9]], dtype=torch.bfloat16)
        >>> product(one, one, turned=True, wide=True) - 1  # bf16 would round to 1
        tensor([[3.8147e-06]])
    """
    if torch.is_grad_enabled():
        if not compat.transforms_active():
            given = (data, weight, copy, bias, bias_copy, turned, wide)
            return _apply_product(*given, loss_scale, edge)
        factor, offset = _use(weight, copy, edge), _use(bias, bias_copy, edge)
    else:
        factor = weight if copy is None else copy
        offset = bias if bias_copy is None else bias_copy
        loss_scale = None
    made = _computed(data, factor, offset, turned=turned, wide=wide)
    return made if loss_scale is None else scaled_result(made, loss_scale)


def _use(weight: Any, copy: Tensor | None, edge: Edge | None) -> Any:
    """A weight as an op reads it that torch differentiates: `weight` without a copy."""
    if copy is None:
        return weight
    if not weight.requires_grad:
        return copy
    if edge is None:
        return low_weight(weight, copy)
    return low_weight_unscaled(weight, copy, *edge)
