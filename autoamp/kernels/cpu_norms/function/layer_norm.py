"""Layer norm of low data on CPUs, as true as the formula in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE

_ATEN = torch.ops.aten


class _LayerNorm(torch.autograd.Function):
    """`aten.layer_norm` of low data, as true as the formula in fp32.

    Torch's kernels of low data take half the time of those of fp32 data, or less, but
    subtract the mean of a row after they have multiplied by its scale.  Where the mean
    is many times the spread, nothing is left but rounding: such data is normalised in
    fp32.  Kept for the backward: the data, and two numbers for each row.
    """

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        data: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        sizes: Sequence[int],
        epsilon: float,
    ) -> Tensor:
        norm = _ATEN.native_layer_norm.default
        given = _wide_parameters(data, weight, bias, sizes)
        result, mean, scale = norm(data, sizes, *given, epsilon)
        ctx.far = math.prod(sizes) == 1 or _are_far_off(mean, scale)
        if ctx.far:
            wide = data.to(HIGH_DTYPE)
            result, mean, scale = norm(wide, sizes, *given, epsilon)
            result = result.to(data.dtype)
        ctx.sizes, ctx.epsilon = sizes, epsilon
        ctx.save_for_backward(data, weight, bias, mean, scale)
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        data, weight, bias, mean, scale = ctx.saved_tensors
        sizes, epsilon = ctx.sizes, ctx.epsilon
        if compat.needs_plain_ops(grad):

            def again(x: Tensor, w: Tensor | None, b: Tensor | None) -> Any:
                return _ATEN.layer_norm.default(x, sizes, w, b, epsilon)

            operands = data, weight, bias
            return (*compat.gradients_by_torch(again, grad, operands), None, None)
        rows = _Rows(data, sizes, mean, scale, epsilon)
        given = _wide_parameters(data, weight, bias, sizes)
        found = (_in_fp32 if ctx.far else _in_low_kernels)(grad, rows, *given)
        pairs = zip(found, (data, weight, bias), strict=True)
        return *(None if t is None else g.to(t.dtype) for g, t in pairs), None, None


class _Rows(NamedTuple):
    """Low data, the statistics of its rows, and how the rows are normalised."""

    data: Tensor
    sizes: Sequence[int]
    mean: Tensor
    scale: Tensor
    epsilon: float


_FAR = 32.0
"""How many times its spread the mean of a row may be for the low kernels.

The backward's kernel loses the square of that, of the 2 ** 24 that fp32 tells apart."""


def _are_far_off(mean: Tensor, scale: Tensor) -> bool:
    """Whether the mean of some row is many times the spread of the row."""
    if compat.is_batch(mean):
        return True  # a batch of several data does not tell
    if mean.is_meta or isinstance(mean, compat.FakeTensor):
        return False  # there are no values: most data is not
    return bool(mean.numel()) and not bool((mean * scale).abs().max() < _FAR)


def _wide_parameters(
    data: Tensor, weight: Tensor | None, bias: Tensor | None, sizes: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in fp32, for which torch's kernel keeps its statistics in fp32.

    Beside low parameters, or none, the kernel rounds the mean and the scale of each row
    to the dtype of the data; a bias alone it takes in that dtype only.
    """
    if weight is None:
        weight = torch.ones(sizes, dtype=HIGH_DTYPE, device=data.device)
    return weight.to(HIGH_DTYPE), None if bias is None else bias.to(HIGH_DTYPE)


def _in_fp32(
    grad: Tensor, rows: _Rows, weight: Tensor, _: Tensor | None
) -> Sequence[Tensor]:
    """The three gradients by the formula, with the means subtracted first.

    The kernel's formula, in fp32 too, loses its digits where a mean is far off.
    """
    size = math.prod(rows.sizes)
    grad, data = (t.to(HIGH_DTYPE).reshape(-1, size) for t in (grad, rows.data))
    mean, scale = (t.view(-1, 1) for t in (rows.mean, rows.scale))
    plain = (data - mean).mul_(scale)
    given = grad * weight.view(-1)
    given -= given.mean(-1, keepdim=True)
    along = torch.linalg.vecdot(given, plain).unsqueeze(-1).div_(size)
    of_data = given.addcmul_(plain, along, value=-1).mul_(scale)
    sums = ((grad * plain).sum(0), grad.sum(0))
    return of_data.view(rows.data.shape), *(t.view(rows.sizes) for t in sums)


def _in_low_kernels(
    grad: Tensor, rows: _Rows, weight: Tensor, bias: Tensor | None
) -> Sequence[Tensor]:
    """The three gradients, those of the parameters as sums in fp32.

    The gradient of the bias is the sum of the rows of `g`, that of the weight the sum
    of the rows of `g * y`, where `y` is the data normalised without weight and bias,
    made again here.  The kernel of a batch norm's backward takes both sums over `y` in
    one pass, and in fp32; that of a layer norm's would take them in low precision.
    """
    data, sizes = rows.data, rows.sizes
    given = (data, sizes, rows.mean, rows.scale, weight, bias)
    of_data = _ATEN.native_layer_norm_backward.default(
        grad, *given, [True, False, False]
    )[0]
    plain = _ATEN.native_layer_norm.default(data, sizes, None, None, rows.epsilon)[0]
    of_weight, of_bias = _sums_of_rows(grad, plain, sizes)
    return of_data, of_weight.view(sizes), of_bias.view(sizes)


def _sums_of_rows(
    grad: Tensor, plain: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The sums, over all dimensions but the last ones, of `grad * plain` and `grad`.

    Rows are the places of an image, laid out with channels last, and the elements of a
    row its channels.  A batch norm of mean 0 and variance 1 changes nothing.

    Returns:
        Two fp32 vectors as long as a row.
    """
    size = math.prod(sizes)
    one = torch.ones(size, dtype=HIGH_DTYPE, device=grad.device)
    zero = torch.zeros_like(one)
    if not grad.numel():
        return zero, zero
    given = (t.reshape(1, -1, 1, size).permute(0, 3, 1, 2) for t in (grad, plain))
    _, of_weight, of_bias = _ATEN.native_batch_norm_backward.default(
        *given, one, zero, one, None, None, False, 0.0, [False, True, True]
    )
    return of_weight, of_bias


apply_layer_norm = compat.direct_apply(_LayerNorm)
