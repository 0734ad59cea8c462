"""Norms and a softmax for CPUs, where torch's own are slow or not true.

Torch 2.13 has one kernel for `aten::rms_norm` on GPUs.  On CPUs the op is five kernels,
its backward is about twenty, and five tensors of the data's size are kept for it.

Torch's kernels of `aten::layer_norm` on CPUs lose the digits of low rows whose numbers
are alike, and sum the gradients of weight and bias over the rows in the dtype of the
data: 512 instead of 16000 in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES

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
        # A row of one element has no spread at all, whatever its scale says.
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
                # Torch's own op can be differentiated again.
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


# At 32 the low kernels have 14 binary digits left, more than the 11 of fp16 and the 8
# of bf16, to which the gradient of the data is rounded.
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

    A bias alone the kernel takes in the dtype of the data only.
    """
    if weight is None:
        # Beside low parameters, or none, the kernel rounds the mean and the scale of
        # each row to the dtype of the data.
        weight = torch.ones(sizes, dtype=HIGH_DTYPE, device=data.device)
    return weight.to(HIGH_DTYPE), None if bias is None else bias.to(HIGH_DTYPE)


def _in_fp32(
    grad: Tensor, rows: _Rows, weight: Tensor, _: Tensor | None
) -> Sequence[Tensor]:
    """The three gradients by the formula, with the means subtracted first."""
    size = math.prod(rows.sizes)
    grad, data = (t.to(HIGH_DTYPE).reshape(-1, size) for t in (grad, rows.data))
    mean, scale = (t.view(-1, 1) for t in (rows.mean, rows.scale))
    # Subtracted before the scale is multiplied in: the kernel's order loses its digits
    # in fp32 too where a mean is far off.
    plain = (data - mean).mul_(scale)
    # With y = (x - mean) * scale and g the gradient of y, the gradient of x is
    # scale * (g - mean(g) - y * mean(g * y)).  The rows of y add up to 0, so that
    # mean(g * y) is the same once the mean of g is taken off.
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
    made again here.
    """
    data, sizes = rows.data, rows.sizes
    given = (data, sizes, rows.mean, rows.scale, weight, bias)
    of_data = _ATEN.native_layer_norm_backward.default(
        grad, *given, [True, False, False]
    )[0]
    plain = _ATEN.native_layer_norm.default(data, sizes, None, None, rows.epsilon)[0]
    # The kernel of a batch norm's backward takes both sums in one pass, and in fp32;
    # that of a layer norm's would take them in low precision.
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
    # An fp32 weight beside low data has the kernel sum in fp32.
    one = torch.ones(size, dtype=HIGH_DTYPE, device=grad.device)
    zero = torch.zeros_like(one)
    if not grad.numel():
        return zero, zero
    given = (t.reshape(1, -1, 1, size).permute(0, 3, 1, 2) for t in (grad, plain))
    _, of_weight, of_bias = _ATEN.native_batch_norm_backward.default(
        *given, one, zero, one, None, None, False, 0.0, [False, True, True]
    )
    return of_weight, of_bias


_apply_layer_norm = compat.direct_apply(_LayerNorm)


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
        # Squares leave the range of fp16 from 256 on.
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
        # The term of the mean, which a layer norm subtracts and this norm does not.
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
    return _apply_layer_norm(data, weight, bias, sizes, epsilon)


OWN_NORMS: dict[Any, Callable[..., Tensor]] = {
    _ATEN.layer_norm.default: layer_norm,
    _ATEN.rms_norm.default: rms_norm,
}
"""Torch's op to the function that does the same on a CPU."""


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
        # Rounded to 16 bits the weights add up to 1 + e.
        weights = weights / weights.sum(-1, keepdim=True)
        return compat.softmax_gradient(grad.to(HIGH_DTYPE), weights).to(result.dtype)


_apply_softmax = compat.direct_apply(_Softmax)


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
    return (
        _apply_softmax(data) if torch.is_grad_enabled() else _SOFTMAX(data, dimension)
    )


def norm_at(node: fx.Node) -> Any:
    """The function to call at a node: its own target, or a norm of our own."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return node.target
    return own_norm(node, value.dtype, value.device)


def own_norm(node: fx.Node, dtype: torch.dtype, device: torch.device) -> Any:
    """As `norm_at`, at a node whose result has `dtype` on `device`.

    An fp32 layer norm is torch's, which is true.
    """
    if node.target not in OWN_NORMS or device.type != "cpu":
        return node.target
    is_low = dtype in LOW_DTYPES.values()
    if node.target is _ATEN.rms_norm.default:
        # Our kernel sums over the last dimension alone.
        one_dimension = len(node.args[1]) == 1  # type: ignore[arg-type]
        takes_it = one_dimension and (is_low or dtype == HIGH_DTYPE)
    else:
        takes_it = is_low
    return OWN_NORMS[node.target] if takes_it else node.target
