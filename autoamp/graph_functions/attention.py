"""Attention by torch's kernels: as the model calls it, and where it was written out.

Attention that was written out can be differentiated any number of times, and the
backward of torch's kernels once (torch 2.13).  And its gradients feel nothing that all
keys have in common, where those of the kernels do (`_apart`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES
from autoamp.graph_functions.cpu_attention import (
    gradients_written_out,
    traced_with_fp32_backward,
    with_fp32_backward,
)

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_LOW = frozenset(LOW_DTYPES.values())


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


def written_attention(  # noqa: PLR0917 - as torch's op
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float,
) -> Tensor:
    """Attention as it was written out: as true, and with derivatives of every order.

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
        >>> written_attention(q, k, v + torch.tensor([[1.0], [3.0]]), scale=1.0).sum()
        tensor(4.)
    """
    assert dropout == 0
    return _centred(_differentiable, query, key, value, mask, is_causal, scale)


def _centred(  # noqa: PLR0917
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """`attend(query, key, value, ...)` of keys and values without their common part."""
    trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    if not trains or query.dtype not in _LOW:
        return attend(query, key, value, mask, is_causal, scale)
    key, _ = _apart(key)
    value, common = _apart(value)
    result = attend(query, key, value, mask, is_causal, scale)
    if mask is not None and mask.dtype == torch.bool:  # a query may see no key at all
        seen = mask.any(-1, keepdim=True).to(result.dtype)
        return torch.addcmul(result, seen, common)
    return result + common


_SAMPLE = 32
"""Keys, at regular distances, of which the common part is taken."""

_MOSTLY_COMMON = 4
"""The variance, in squares of the mean, up to which the mean is taken away.  With a
larger variance numbers and differences are alike, and the latter rounded once more."""


def _apart(values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or values less a part that most of them share, and that part.

    With `P` the weights and `g` the gradient of the result `y`, the gradient of the
    scores is `P * (g @ v.T - sum(g * y))`.  The kernels read `y` rounded to 16 bits, so
    that the gradients of all scores of a query have an error in common, as large as the
    values are and not as they differ.  Where tokens are alike, it is many times the
    error of autocast (`tests/test_attention_gradients.py`).

    A number added to all scores of a query changes no weight, and the weights of a
    query add up to 1: so a vector may be taken away from all keys of a head, and one
    from all values if the result gets it back.  Both are constants, through which no
    gradient flows.

    Args:
        values: (batch, heads, keys, width).

    Returns:
        The differences, and the part, (batch, heads, 1, width).  The part is 0 where
        the variance is large, and in channels that hold an infinity.
    """
    step = max(1, values.shape[2] // _SAMPLE)
    sample = values.detach()[:, :, ::step]
    spread, mean = torch.var_mean(sample, 2, correction=0, keepdim=True)
    is_common = spread <= _MOSTLY_COMMON * mean * mean
    common = torch.where(is_common, mean, 0)
    return values - common, common


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


def traced_written_attention(  # noqa: PLR0917 - as torch's op
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float,
) -> Tensor:
    """As `written_attention`, in a form AOT autograd traces."""
    assert dropout == 0
    attend = traced_with_fp32_backward
    return _centred(attend, query, key, value, mask, is_causal, scale)


def plain_written_attention(  # noqa: PLR0917 - as torch's op
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float,
) -> Tensor:
    """As `traced_written_attention`, with ops of torch's alone."""
    assert dropout == 0
    return _centred(_by_torch, query, key, value, mask, is_causal, scale)


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


def _differentiable(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """`aten.scaled_dot_product_attention`, which can be differentiated twice."""
    result = with_fp32_backward(query, key, value, mask, is_causal, scale)
    if result is not None:
        return result
    result = _by_torch(query, key, value, mask, is_causal, scale)
    node = result.grad_fn
    if node is not None and node.name().startswith("ScaledDotProduct"):
        again = functools.partial(_again, is_causal, scale)
        compat.hook_after_node(node, again)
    return result


@compat.never_captured
def _again(
    is_causal: bool,
    scale: float,
    grads: Sequence[Tensor | None],
    given: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...] | None:
    """The gradients that a kernel's backward gave, differentiable where need be."""
    grad = given[0]
    if not torch.is_grad_enabled() or grad is None:
        return None
    operands, mask = compat.saved_by_attention()
    found = gradients_written_out(grad, operands, mask, is_causal, scale)
    return (*found, *grads[len(operands) :])
