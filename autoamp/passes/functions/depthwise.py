"""Depthwise convolutions, whose weights have gradients by oneDNN's kernel for such.

OneDNN's kernel for the gradient of depthwise weights takes filters of up to 3 columns,
however many rows they have.  Wider ones go to a kernel for whole groups, which computes
16 x 16 products for each that is needed: 20 ms instead of 1.4 ms for 96 filters of
7 x 7 over 4 images of 56 x 56, in bf16 with the channels last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from autoamp import compat

_ATEN = torch.ops.aten
_OPS = {3: _ATEN.conv1d.default, 4: _ATEN.conv2d.default}
"""The op, by the number of dimensions of the data."""

COLUMNS = 3
"""The most columns of a filter that oneDNN's kernel takes."""


class _Depthwise(torch.autograd.Function):
    """`depthwise`.  Kept for the backward: what torch's own backward keeps."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        data: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
    ) -> Tensor:
        groups = weight.shape[0]

        def again(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            op = _OPS[data.dim()]
            return op(x, w, b, stride, padding, [1], groups)  # type: ignore[no-any-return]

        ctx.again, ctx.stride, ctx.padding = again, stride, padding
        ctx.save_for_backward(data, weight, bias)
        return again(data, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        data, weight, bias = operands = ctx.saved_tensors
        rest = None, None
        if compat.needs_plain_ops(grad):
            return (*compat.gradients_by_torch(ctx.again, grad, operands), *rest)
        of_data, of_weight, of_bias = ctx.needs_input_grad[:3]
        found: list[Tensor | None] = [None, None, None]
        if of_data:
            found[0] = _backward(
                grad, data, weight, ctx.stride, ctx.padding, [True, False, False]
            )[0]
        if of_weight:
            found[1] = _of_weight(grad, data, weight, ctx.stride, ctx.padding)
        if of_bias and bias is not None:
            # The kernel keeps its sums in fp32, and rounds them once.
            found[2] = grad.sum((0, *range(2, grad.dim())))
        return (*found, *rest)


def _backward(  # noqa: PLR0917
    grad: Tensor,
    data: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    needed: list[bool],
) -> Any:
    once, none = [1] * len(stride), [0] * len(stride)
    return _ATEN.convolution_backward.default(
        *(grad, data, weight, None, stride, padding, once),
        *(False, none, weight.shape[0], needed),
    )


def _of_weight(
    grad: Tensor,
    data: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """The gradient of the weight, a few columns of the filters at a time."""
    if grad.dim() < 4:
        # A sequence is an image of one column, whose rows the kernel takes.
        grad, data, weight = (t.unsqueeze(-1) for t in (grad, data, weight))
        return _of_weight(grad, data, weight, (*stride, 1), (*padding, 0)).squeeze(-1)
    # The kernel for images whose channels are first is slower than a copy.
    last = torch.channels_last
    grad, data = (t.contiguous(memory_format=last) for t in (grad, data))
    rows, columns = weight.shape[2:]
    parts = -(-columns // COLUMNS)
    # The parts are columns of the result: no sum is cut in two and rounded twice.
    edges = [at * columns // parts for at in range(parts + 1)]
    found = []
    for begin, end in itertools.pairwise(edges):
        # What these columns of the filters meet, padded here: the kernel takes no
        # padding of more than half a filter.
        starts = -padding[0], begin - padding[1]
        sizes = (
            (count - 1) * step + size
            for count, step, size in zip(
                grad.shape[2:], stride, (rows, end - begin), strict=True
            )
        )
        seen = _part(data, starts, [*sizes])
        of_part = _backward(
            grad, seen, weight[..., begin:end], stride, (0, 0), [False, True, False]
        )
        found.append(of_part[1])
    return torch.cat(found, -1) if parts > 1 else found[0]


def _part(data: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Rows and columns of images, from `starts` on; zeros outside of the images."""
    padding: list[int] = []
    for dimension, start, size in zip((2, 3), starts, sizes, strict=True):
        extent = data.shape[dimension]
        begin = min(max(start, 0), extent)
        end = min(max(start + size, begin), extent)
        before = min(begin - start, size) if start < 0 else 0
        data = data.narrow(dimension, begin, end - begin)
        padding[:0] = before, size - before - (end - begin)
    return functional.pad(data, padding)


_apply_depthwise = compat.direct_apply(_Depthwise)


def depthwise(  # noqa: PLR0917 - as torch's op
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """`aten.conv2d`, or `aten.conv1d`, with one filter for each channel.

    The weight's gradient is that of torch, by a kernel that is some ten times as fast.

    Args:
        data: images (N, C, H, W), or sequences (N, C, L), in bf16.
        weight: (C, 1, rows, columns), or (C, 1, length), in the dtype of `data`.
        bias: (C,), in the dtype of `data`.
        stride, padding: one number, or one for each dimension of a filter.
        dilation: ones.
        groups: C.

    Returns:
        A tensor in the dtype of `data`, as torch's op gives it.

    Example:
        >>> image = torch.ones(1, 2, 1, 4, dtype=torch.bfloat16)
        >>> depthwise(image, image.view(2, 1, 1, 4), groups=2)
        tensor([[[[4.]],
        <BLANKLINE>
                 [[4.]]]], dtype=torch.bfloat16)
    """
    if not torch.is_grad_enabled():
        op = _OPS[data.dim()]
        return op(data, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
    inner = data.dim() - 2  # one number stands for each dimension
    each = ([*s] * inner if len(s) == 1 else [*s] for s in (stride, padding))
    return _apply_depthwise(data, weight, bias, *each)


OPS = frozenset(_OPS.values())
"""The ops that `depthwise` stands for."""


_LEAST = 2**18
"""With so many products torch's kernel takes longer than the calls of ours."""

_DEFAULTS: tuple[Any, ...] = (None, [1], [0], [1], 1)
"""The arguments after the weight: bias, stride, padding, dilation and groups."""


def depthwise_at(node: fx.Node) -> Any:
    """The function to call at a node: ours for bf16 filters that oneDNN is slow with.

    Returns:
        The node's own target everywhere else.
    """
    if node.target not in OPS or node.kwargs:
        return node.target
    weight: Any = node.args[1]
    given: Any = (*node.args[2:], *_DEFAULTS[len(node.args) - 2 :])
    _, _, padding, dilation, groups = given
    result, (channels, depth, *sizes) = node.meta["val"], weight.meta["val"].shape
    if result.dtype != torch.bfloat16 or result.dim() != 2 + len(sizes):
        return node.target  # no low dtype, or one image without a batch
    if not (channels == groups > depth == 1 and {*dilation} == {1}):
        return node.target
    filters = [*map(compat.hint, sizes)]
    products = math.prod(map(compat.hint, result.shape)) * math.prod(filters)
    # The kernel for depthwise filters takes no padding of more than half a filter.
    most = padding * len(filters) if len(padding) == 1 else padding
    padded = any(2 * p > size for p, size in zip(most, filters, strict=True))
    is_slow = products >= _LEAST and (filters[-1] > COLUMNS or padded)
    return depthwise if is_slow else node.target
