"""Rotary position embedding as one call.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021
(arXiv:2104.09864).  Written out, as in libraries, it is six to eight kernels, and its
backward is ten, some of which write zeros to add them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE


class _Rotary(torch.autograd.Function):
    """`rotary`, whose backward turns the gradient back, in fp32 inside as well.

    Kept for the backward: `cosine` and `sine`, which the layers of a model share.
    """

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        data: Tensor,
        cosine: Tensor,
        sine: Tensor,
        dtype: torch.dtype,
        sign: int,
        pairs: bool,
        contiguous: bool,
    ) -> Tensor:
        # The data is not kept: the angles need no gradient here.
        ctx.save_for_backward(cosine, sine)
        ctx.how = data.dtype, sign, pairs
        first, second = _halves(sine, pairs=pairs)
        # Low data are laid out anew in the pass that widens them.
        wide = (
            data.to(HIGH_DTYPE, memory_format=torch.contiguous_format)
            if contiguous
            else widened(data)
        )
        return _turned(wide, cosine, first, second, sign, pairs=pairs).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        dtype, sign, pairs = ctx.how
        first, second = _halves(sine, pairs=pairs)
        if compat.needs_plain_ops(grad):
            crossed = _joined(second, first, sine, pairs=pairs)
            of_data = _written_out(grad.to(HIGH_DTYPE), cosine, crossed, -sign, pairs)
        else:
            # With y1 = x1 * c1 + s * x2 * s1 and y2 = x2 * c2 - s * x1 * s2, and g the
            # gradient of y, that of x1 is g1 * c1 - s * g2 * s2, and that of x2 is
            # g2 * c2 + s * g1 * s1: the same with the sign turned, and the sines of the
            # halves exchanged.
            wide = widened(grad)
            of_data = _turned(wide, cosine, second, first, -sign, pairs=pairs)
        return of_data.to(dtype), None, None, None, None, None, None


def _halves(tensor: Tensor, *, pairs: bool) -> tuple[Tensor, Tensor]:
    """The two parts of each row that are turned into each other, as views."""
    if pairs:
        return tensor[..., ::2], tensor[..., 1::2]
    half = tensor.shape[-1] // 2
    return tensor[..., :half], tensor[..., half:]


def _joined(first: Tensor, second: Tensor, like: Tensor, *, pairs: bool) -> Tensor:
    """Rows like those of `like`, of their two parts."""
    ends = torch.stack if pairs else torch.cat
    return ends((first, second), -1).view_as(like)


def _written_out(
    data: Tensor, cosine: Tensor, sine: Tensor, sign: int, pairs: bool
) -> Tensor:
    """The result in fp32, by torch's plain ops."""
    first, second = _halves(data, pairs=pairs)
    other = _joined(sign * second, -sign * first, data, pairs=pairs)
    return data * cosine + other * sine


def _turned(
    wide: Tensor,
    cosine: Tensor,
    sine_of_first: Tensor,
    sine_of_second: Tensor,
    sign: int,
    *,
    pairs: bool,
) -> Tensor:
    """The result in fp32, laid out as `wide` is."""
    result = wide * cosine
    (first, second), (to_first, to_second) = (
        _halves(t, pairs=pairs) for t in (wide, result)
    )
    # In place on the halves of one tensor: no `cat`, and no tensor for the exchanged
    # halves.
    to_first.addcmul_(second, sine_of_first, value=sign)
    to_second.addcmul_(first, sine_of_second, value=-sign)
    return result


def widened(data: Tensor) -> Tensor:
    """`data` as the ops read it: an op of two dtypes would copy it each time on a CPU.

    On GPUs such an op converts its operands in registers.
    """
    return data.to(HIGH_DTYPE) if data.device.type == "cpu" else data


_apply = compat.direct_apply(_Rotary)


def rotary(  # noqa: PLR0917
    data: Tensor,
    cosine: Tensor,
    sine: Tensor,
    dtype: torch.dtype,
    sign: int,
    pairs: bool,
    contiguous: bool = False,
) -> Tensor:
    """`data * cosine + other * sine`, where `other` are the two halves exchanged.

    Computed in fp32, forward and backward, and rounded once.

    Args:
        data: any shape whose last dimension is even; fp32, fp16 or bf16.
        cosine, sine: fp32, broadcast to the shape of `data`, with its last dimension.
        dtype: the dtype of the result.
        sign: the sign of the first half of `other`, whose second half has the opposite
            sign; -1 as in the paper.
        pairs: whether the halves are the even and the odd elements of a row, and not
            its beginning and its end.
        contiguous: whether the result is contiguous, and not laid out as `data` is.

    Returns:
        A tensor of the shape of `data`.

    Example:
        >>> one, zero = torch.ones(4), torch.zeros(4)
        >>> rotary(torch.arange(4.0), zero, one, torch.float32, -1, False)
        tensor([-2., -3.,  0.,  1.])
    """
    if torch.is_grad_enabled() and (cosine.requires_grad or sine.requires_grad):
        # The products widen the data, and keep it for the angles' gradients as it is.
        plain = data.contiguous() if contiguous else data
        return _written_out(plain, cosine, sine, sign, pairs).to(dtype)
    return _apply(data, cosine, sine, dtype, sign, pairs, contiguous)
