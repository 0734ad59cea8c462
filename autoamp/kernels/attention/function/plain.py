"""Attention in fp32 by torch's plain ops, which can be differentiated at will."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.kernels.attention.function.scores import Step, stepped


def recorded_gradients(
    grad: Tensor,
    operands: tuple[Tensor, ...],
    steps: Sequence[Step],
    *,
    safe: bool = False,
) -> list[Tensor | None]:
    """The gradients of query, key and value, so that they can be differentiated."""
    with torch.enable_grad():
        query, key, value = operands
        result = written_out(query, key, value, steps, safe=safe).to(grad.dtype)
        needing = [t for t in operands if t.requires_grad]
        found = iter(torch.autograd.grad(result, needing, grad, create_graph=True))
    return [next(found) if t.requires_grad else None for t in operands]


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: Sequence[Step],
    *,
    safe: bool = False,
) -> Tensor:
    """Attention in fp32 by torch's plain ops, which can be differentiated at will.

    Args:
        query, key, value: (batch, heads, queries or keys, width).
        steps: the changes of the scores.
        safe: whether a query that sees no key has weights of 0, and not NaN.
    """
    query, key, value = (t.to(HIGH_DTYPE) for t in (query, key, value))
    scores = stepped(query @ key.mT, steps)
    weights = compat.safe_softmax(scores) if safe else scores.softmax(-1)
    return weights @ value
