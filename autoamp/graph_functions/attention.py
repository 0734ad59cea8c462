"""Attention as the model calls it: `scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from autoamp.graph_functions.cpu_attention import (
    traced_with_fp32_backward,
    with_fp32_backward,
)

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def attention(  # noqa: PLR0917 - as torch's op
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`aten.scaled_dot_product_attention`, with a backward in fp32 on CPUs.

    Args:
        query: (batch, heads, queries, width), fp32, fp16 or bf16.
        key, value: (batch, heads, keys, width), in the dtype of `query`.
        attn_mask: bool, True where a key is seen, or numbers to add to the scores.
        dropout_p: the probability with which a weight becomes 0.
        is_causal: whether a query sees no later keys.
        scale: the factor of the scores; by default one over the root of `width`.
        enable_gqa: whether key and value may have fewer heads than `query`.

    Returns:
        A tensor of the shape and dtype of `query`.

    Example:
        >>> q, k, v = torch.zeros(3, 1, 1, 2, 1).unbind()
        >>> attention(q, k, v + torch.tensor([[1.0], [3.0]])).flatten()
        tensor([2., 2.])
    """
    given = (query, key, value, attn_mask, is_causal, scale)
    result = None if dropout_p or enable_gqa else with_fp32_backward(*given)
    return _by_torch(*given, dropout_p, enable_gqa) if result is None else result


def traced_attention(  # noqa: PLR0917 - as torch's op
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `attention`, in a form AOT autograd traces."""
    given = (query, key, value, attn_mask, is_causal, scale)
    if dropout_p or enable_gqa:
        return _by_torch(*given, dropout_p, enable_gqa)
    return traced_with_fp32_backward(*given)


def _by_torch(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout: float = 0.0,
    enable_gqa: bool = False,
) -> Tensor:
    return _ATTENTION(  # type: ignore[no-any-return]
        *(query, key, value, mask, dropout, is_causal),
        scale=scale,
        enable_gqa=enable_gqa,
    )
