"""`scaled_dot_product_attention` as a model calls it, with a backward in fp32 on CPUs.

Torch's kernel for 16 bits on CPUs has a backward that is not as true as the calls that
it stands for; `autoamp/kernels/attention/function/ops.py` says why, and has the
backward that is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES
from autoamp.kernels.attention.function import gradients
from autoamp.kernels.attention.function.scores import Kind, for_kernel, steps_of

_KERNELS = compat.cpu_attention()
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_NODE = "ScaledDotProductFlashAttentionForCpu"
"""The name by which torch's graph of gradients calls the node of the kernel."""

_LOW = frozenset(LOW_DTYPES.values())
_PLAIN = (Tensor, torch.nn.Parameter, type(None))

LONG = 768
"""Queries from which on torch's kernel takes them in blocks of 256, and its backward in
16 bits is the faster one."""


class _Attention(torch.autograd.Function):
    """Torch's kernel, the gradients of which are computed in fp32."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kinds: Sequence[int],
        numbers: Sequence[float],
        *tensors: Tensor,
    ) -> Tensor:
        assert _KERNELS is not None
        given = for_kernel(steps_of(tensors, kinds, numbers), query, key.shape[2])
        result, _ = _KERNELS[0](
            *(query, key, value, 0.0, given.is_causal),
            attn_mask=given.mask,
            scale=given.scale,
        )
        ctx.given, ctx.masked = (kinds, numbers), bool(tensors)
        ctx.save_for_backward(query, key, value, *tensors)
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A mask of the caller's may hide all keys from a query.  The saved tensors are
        # read once: a checkpoint gives each only once.
        return gradients(ctx, grad, safe=ctx.masked)


_apply = compat.direct_apply(_Attention)


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


def with_fp32_backward(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor | None:
    """Attention whose backward computes in fp32; None where torch's own is to be taken.

    Torch's own is: where no gradient is recorded, on other devices, in fp32, for `LONG`
    queries and more, where there are no numbers, for tensor subclasses and inside
    transforms of torch.func, and where torch has no one kernel for the operands.
    """
    operands = query, key, value
    if (
        not _fits(*operands, mask)
        or any(type(t) not in _PLAIN for t in (*operands, mask))
        or compat.transforms_active()
    ):
        return None
    if not compat.runs_one_kernel(*operands, mask, 0.0, is_causal, scale=scale):
        return None
    kinds, numbers, tensors = _as_steps(query, mask, is_causal, scale)
    return _apply(*operands, kinds, numbers, *tensors)


def traced_with_fp32_backward(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention in a form that AOT autograd traces, its backward in fp32 where it can.

    Torch's own attention is called in any case, as its kernel shows in the node that
    the call records; a compiler drops the call where nobody reads its result.
    """
    result: Tensor = _ATTENTION(query, key, value, mask, 0.0, is_causal, scale=scale)
    node = result.grad_fn
    runs_kernel = node is not None and node.name().startswith(_NODE)
    if not runs_kernel or not _fits(query, key, value, mask):
        return result
    kinds, numbers, tensors = _as_steps(query, mask, is_causal, scale)
    return _apply(query, key, value, kinds, numbers, *tensors)


def _as_steps(
    query: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[list[int], list[float], list[Tensor]]:
    """What torch's attention does to its scores, as steps."""
    kinds: list[int] = [Kind.SCALE]
    numbers = [query.shape[-1] ** -0.5 if scale is None else scale]
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        kinds.append(Kind.KEEP if is_bool else Kind.ADD)
        numbers.append(-torch.inf)
    if is_causal:
        kinds.append(Kind.CAUSAL)
        numbers.append(-torch.inf)
    return kinds, numbers, [] if mask is None else [mask]


def _is_trained(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in operands)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the backward in fp32 computes this attention's gradients, and faster."""
    return (
        _KERNELS is not None
        and query.dtype in _LOW
        and query.is_cpu
        and query.dim() == 4
        and query.shape[2] < LONG
        and query.numel() > 0
        and _is_trained(query, key, value)
        and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
    )
