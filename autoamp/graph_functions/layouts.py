"""A change of layout, whose gradient is laid out as the operand was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp import compat


class _LaidOut(torch.autograd.Function):
    """A copy in another memory format; the gradient is permuted back."""

    @staticmethod
    def forward(
        ctx: Any, data: Tensor, to: torch.memory_format, back: torch.memory_format
    ) -> Tensor:
        ctx.back = back
        return data.clone(memory_format=to)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.contiguous(memory_format=ctx.back), None, None


_apply = compat.direct_apply(_LaidOut)


def laid_out(
    data: Tensor, to: torch.memory_format, back: torch.memory_format
) -> Tensor:
    """A copy of `data` in memory format `to`, whose gradient comes in `back`.

    Args:
        data: four or five dimensions, any dtype.
        to, back: `torch.contiguous_format` and a format with the channels last, or the
            other way round.

    Example:
        >>> image = torch.zeros(1, 3, 2, 2)
        >>> laid_out(image, torch.channels_last, torch.contiguous_format).stride()
        (12, 1, 6, 3)
    """
    return _apply(data, to, back)
