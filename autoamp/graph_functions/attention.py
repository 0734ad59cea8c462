"""Attention by torch's kernels, with derivatives of every order.

The backward of these kernels has no backward of its own (torch 2.13), as attention that
is written out has.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def attention(  # noqa: PLR0917 - as torch's op
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float,
) -> Tensor:
    """`aten.scaled_dot_product_attention`, which can be differentiated twice.

    Args:
        query: (batch, heads, queries, width), fp32, fp16 or bf16.
        key, value: (batch, heads, keys, width), in the dtype of `query`.
        mask: bool, True where a key is seen, or numbers to add to the scores.
        dropout: must be 0.
        is_causal: whether a query sees no later keys.
        scale: the factor of the scores.

    Returns:
        A tensor of the shape and dtype of `query`.

    Example:
        >>> q, k, v = torch.zeros(3, 1, 1, 2, 1).unbind()
        >>> attention(q, k, v + torch.tensor([[1.0], [3.0]]), scale=1.0).flatten()
        tensor([2., 2.])
    """
    assert dropout == 0
    result = _ATTENTION(query, key, value, mask, 0.0, is_causal, scale=scale)
    node = result.grad_fn
    if node is not None and node.name().startswith("ScaledDotProduct"):
        again = functools.partial(_again, is_causal, scale)
        compat.hook_after_node(node, again)
    return result  # type: ignore[no-any-return]


@compat.never_captured
def _again(
    is_causal: bool,
    scale: float,
    grads: Sequence[Tensor | None],
    given: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...] | None:
    """The gradients that a kernel's backward gave, differentiable where need be.

    Then they are the gradients of attention written out.
    """
    grad = given[0]
    if not torch.is_grad_enabled() or grad is None:
        return None
    operands, mask = compat.saved_by_attention()
    query, key, value = (t.to(HIGH_DTYPE) for t in operands)
    scores = query @ key.transpose(-2, -1) * scale
    if mask is not None:
        scores = scores + mask
    if is_causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    result = (scores.softmax(-1) @ value).to(grad.dtype)
    needing = [t for t in operands if t.requires_grad]
    found = iter(torch.autograd.grad(result, needing, grad, create_graph=True))
    again: list[Any] = [next(found) if t.requires_grad else None for t in operands]
    return (*again, *grads[len(operands) :])
