"""Attention in fp32 by torch's plain ops, which can be differentiated at will."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.kernels.attention.function.scores import Step, stepped


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
