"""Attention in 16 bits on CPUs, whose backward computes in fp32.

The backward of torch 2.13's kernel (`cpu_flash_attention_backward` of
`aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`) multiplies blocks of 32 or 64
queries, each of 16-bit products a call of its own with more set-up than work, and sums
the gradients of keys and values over the blocks in 16 bits.  The same kernel in fp32
took from a twelfth to two thirds of the time, casts included, and its error was that of
rounding its results.  From `LONG` queries on the blocks have 256, and the kernel for 16
bits is the faster one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES

_KERNELS = compat.cpu_attention()

LONG = 768
"""Queries from which on the kernel takes them in blocks of 256."""

_CACHE = 2 * 2**20
"""Bytes of fp32 operands and results that one thread works on at a time, so that these
stay in the cache of its core."""

_NAME = "attention_backward"
_SCHEMA = (
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor result, "
    "Tensor logsumexp, Tensor? mask, bool is_causal, float? scale) "
    "-> (Tensor, Tensor, Tensor)"
)


def _backward(  # noqa: PLR0917 - as the kernel
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, some heads at a time."""
    assert _KERNELS is not None
    given = (grad, query, key, value, result)
    made = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    wide = None if mask is None else mask.to(HIGH_DTYPE)
    for part in _parts(query, key):
        found = _KERNELS[1](
            *(t[part].to(HIGH_DTYPE) for t in given),
            logsumexp[part],
            0.0,
            is_causal,
            attn_mask=None if wide is None else _of_part(wide, part),
            scale=scale,
        )
        for all_of_it, some in zip(made, found, strict=True):
            all_of_it[part].copy_(some)
    return made


def _parts(query: Tensor, key: Tensor) -> list[tuple[slice, slice]]:
    """The batches and heads to compute at a time, which together fit the caches."""
    batch, heads, queries, width = query.shape
    threads = torch.get_num_threads()
    size = 4 * HIGH_DTYPE.itemsize * width * (queries + key.shape[2])
    count = max(threads, threads * _CACHE // size)
    if count >= heads:
        step = count // heads
        return [(slice(b, b + step), slice(None)) for b in range(0, batch, step)]
    return [
        (slice(b, b + 1), slice(h, h + count))
        for b in range(batch)
        for h in range(0, heads, count)
    ]


def _of_part(mask: Tensor, part: tuple[slice, slice]) -> Tensor:
    """The numbers of a mask (2 or 4 dimensions) for some batches and heads."""
    if mask.dim() == 2:
        return mask
    batches, heads = mask.shape[:2]
    nothing = slice(None)
    return mask[part[0] if batches > 1 else nothing, part[1] if heads > 1 else nothing]


def _like_operands(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _op() -> Any:
    """The backward as one op: profilers and dispatch modes see one kernel."""
    library = torch.library.Library("autoamp", "FRAGMENT")
    if not hasattr(torch.ops.autoamp, _NAME):
        library.define(_NAME + _SCHEMA)
        library.impl(_NAME, _backward, "CPU")
        library.impl(_NAME, _like_operands, "Meta")
        _LIBRARIES.append(library)  # which takes its ops away where nobody holds it
    return getattr(torch.ops.autoamp, _NAME).default


_LIBRARIES: list[torch.library.Library] = []


class _Attention(torch.autograd.Function):
    """Torch's kernel, the gradients of which are computed in fp32."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        assert _KERNELS is not None
        result, logsumexp = _KERNELS[0](
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        ctx.is_causal, ctx.scale = is_causal, scale
        ctx.save_for_backward(query, key, value, result, logsumexp, mask)
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, logsumexp, mask = ctx.saved_tensors
        options = (mask, ctx.is_causal, ctx.scale)
        if torch.is_grad_enabled():
            found = gradients_written_out(grad, (query, key, value), *options)
            return (*found, None, None, None)
        given = (grad, query, key, value, result, logsumexp)
        return (*_OWN_BACKWARD(*given, *options), None, None, None)


_apply = compat.direct_apply(_Attention)
_OWN_BACKWARD = _op()


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
    given = (*operands, _of_kernel(mask, query.dtype))
    if not compat.runs_one_kernel(*given, 0.0, is_causal, scale=scale):
        return None
    return _apply(*given, is_causal, scale)


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
    return _apply(query, key, value, _of_kernel(mask, query.dtype), is_causal, scale)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the backward in fp32 computes this attention's gradients, and faster."""
    return (
        _KERNELS is not None
        and query.dtype in _LOW
        and query.is_cpu
        and query.dim() == 4
        and query.shape[2] < LONG
        and query.numel() > 0
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
        and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
    )


def _of_kernel(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as torch gives it to the kernel: numbers that are added."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    hidden = torch.zeros_like(mask, dtype=dtype)
    return hidden.masked_fill_(mask.logical_not(), -torch.inf)


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_NODE = "ScaledDotProductFlashAttentionForCpu"
"""The name by which torch's graph of gradients calls the node of the kernel."""

_LOW = frozenset(LOW_DTYPES.values())
_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def gradients_written_out(
    grad: Tensor,
    operands: tuple[Tensor, ...],
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> list[Tensor | None]:
    """The gradients of attention, written out, so that they can be differentiated.

    Args:
        grad: the gradient of the result.
        operands: query, key and value, with their history.
        mask: the numbers added to the scores.
        is_causal: whether a query sees no later keys.
        scale: the factor of the scores; None for one over the root of their length.
    """
    with torch.enable_grad():
        query, key, value = (t.to(HIGH_DTYPE) for t in operands)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query @ key.transpose(-2, -1) * factor
        if mask is not None:
            scores = scores + mask
        if is_causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        result = (scores.softmax(-1) @ value).to(grad.dtype)
        needing = [t for t in operands if t.requires_grad]
        found = iter(torch.autograd.grad(result, needing, grad, create_graph=True))
    return [next(found) if t.requires_grad else None for t in operands]
