"""Attention on CPUs as ops: torch's kernel forward, and a backward in fp32.

The backward of torch 2.13's kernel (`cpu_flash_attention_backward` of
`aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`) is not as true as the calls that
the kernel stands for:

- It makes the weights of a query again as `exp(score - logsumexp)` from scores that it
  has computed anew.  Where scores are large, the two differ by some units in the last
  place of fp32, which is a factor of the weights: these no longer add up to 1, and the
  gradient of the values was 9e5 times as large as it should be for data of 1e4.
- It takes `sum(g * y)` of the result `y`, rounded to 16 bits, for the average that the
  weights give, so that the gradients of all scores of a query have an error in common.
- In 16 bits, it sums gradients of keys and values over blocks of queries in 16 bits.

The backward here makes the weights by a softmax, and their average of themselves.  It
works on some heads and some queries at a time, so that a block stays in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.graph_functions.scores import (
    KernelScores,
    Step,
    for_kernel,
    stepped_,
    stepped_back_,
    steps_of,
)

KERNELS = compat.cpu_attention()

_CACHE = 2 * 2**20
"""Bytes of fp32 operands, scores and results that one thread works on at a time, so
that these stay in the cache of its core."""

_FEWEST = 64
"""The fewest queries of a part: products of fewer rows are slow."""

_VANISHED = 104.0
"""In fp32 `exp(-x)` is 0 from here on: the smallest number is exp(-103.28)."""

_NAMES = ("attention_forward", "attention_backward")
_STEPS = "Tensor[] tensors, int[] kinds, float[] numbers"
_TAKES = f"Tensor query, Tensor key, Tensor value, {_STEPS}"
_SCHEMAS = (
    f"({_TAKES}) -> Tensor",
    f"(Tensor grad, {_TAKES}, bool safe) -> (Tensor, Tensor, Tensor)",
)


def _forward(  # noqa: PLR0917 - as its schema
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: Sequence[Tensor],
    kinds: Sequence[int],
    numbers: Sequence[float],
) -> Tensor:
    """Attention as it was written: by the kernel where the kernel computes just that.

    The kernel hides what the model fills with a number.  That is the same if in every
    row the filled scores are so far below the others that fp32 has no weight for them,
    which the kernel's own logarithms of the sums tell.
    """
    assert KERNELS is not None
    steps = steps_of(tensors, kinds, numbers)
    given = for_kernel(steps, query, key.shape[2])
    rows = [t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)]
    result, sums = KERNELS[0](
        *rows, 0.0, given.is_causal, attn_mask=given.mask, scale=given.scale
    )
    made = torch.empty_like(query)
    if _computes_as_written(given, sums, key.shape[2]):
        # A dimension of size 1 may have another stride than `_like_query` promised.
        same = result.stride() == made.stride()
        return result if same else made.copy_(result)
    for part in _parts(query, key, value, steps):
        part.of(made).copy_(part.weights() @ part.value)
    return made


def _computes_as_written(given: KernelScores, sums: Tensor, keys: int) -> bool:
    """Whether the kernel's result, with these logarithms of sums, is as written."""
    if given.mask is not None:
        # The kernel gives 0 for a query that sees nothing; as written that is NaN.
        sees = given.mask.amax(-1) > -torch.inf
        if not bool(sees.all()):
            return False
    if given.filled == -torch.inf:
        return True
    return bool((sums >= given.filled + _VANISHED + math.log(keys)).all())


def _backward(  # noqa: PLR0917 - as its schema
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: Sequence[Tensor],
    kinds: Sequence[int],
    numbers: Sequence[float],
    safe: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value.

    Args:
        safe: whether a query that sees no key has weights of 0, and not NaN.
    """
    steps = steps_of(tensors, kinds, numbers)
    of_query, of_key, of_value = (torch.empty_like(t) for t in (query, key, value))
    sums: list[Tensor] = []
    for part in _parts(query, key, value, steps):
        slopes = part.of(grad).to(HIGH_DTYPE)
        weights = part.weights(safe=safe)
        found = compat.softmax_gradient(slopes @ part.value.mT, weights)
        stepped_back_(found, part.steps, part.first)
        part.of(of_query).copy_(found @ part.key)
        some = [found.mT @ part.query, weights.mT @ slopes]
        sums = [a.add_(b) for a, b in zip(sums, some, strict=True)] if sums else some
        if part.is_last:
            of_key[part.heads].copy_(sums[0])
            of_value[part.heads].copy_(sums[1])
            sums = []
    return of_query, of_key, of_value


@dataclass(frozen=True)
class _Part:
    """Some heads, and some of their queries, in fp32.

    Attributes:
        heads: the batches and heads.
        first, last: the numbers of the first query and of the one after the last.
        is_last: whether these are the last queries of their heads.
        query: (batches, heads, queries, width); `key` and `value` for all keys.
        steps: the steps of these scores.
    """

    heads: tuple[slice, slice]
    first: int
    last: int
    is_last: bool
    query: Tensor
    key: Tensor
    value: Tensor
    steps: list[Step]

    def of(self, whole: Tensor) -> Tensor:
        """The part of a tensor that has a row for each query."""
        return whole[(*self.heads, slice(self.first, self.last))]

    def weights(self, *, safe: bool = False) -> Tensor:
        """The weights, (batches, heads, queries, keys)."""
        scores = stepped_(self.query @ self.key.mT, self.steps, self.first)
        return compat.safe_softmax(scores) if safe else scores.softmax(-1)


def _parts(
    query: Tensor, key: Tensor, value: Tensor, steps: Sequence[Step]
) -> Iterator[_Part]:
    """All of an attention, in parts that fit the caches together."""
    queries, keys, width = query.shape[2], key.shape[2], query.shape[3]
    size = HIGH_DTYPE.itemsize * 2 * (width * (queries + keys) + queries * keys)
    threads = torch.get_num_threads()
    for heads in _some_heads(query, max(threads, threads * _CACHE // size)):
        wide = [_wide(t[heads]) for t in (query, key, value)]
        row = HIGH_DTYPE.itemsize * 2 * keys * wide[0].shape[:2].numel()
        count = max(_FEWEST, threads * _CACHE // row)
        for first in range(0, queries, count):
            last = min(first + count, queries)
            seen = [s.part(*heads, slice(first, last), slice(None)) for s in steps]
            own = wide[0][:, :, first:last]
            is_last = last == queries
            yield _Part(heads, first, last, is_last, own, wide[1], wide[2], seen)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(HIGH_DTYPE).contiguous()


def _some_heads(query: Tensor, count: int) -> Iterator[tuple[slice, slice]]:
    """All batches and heads of `query`, `count` heads at a time."""
    batch, heads = query.shape[:2]
    if count >= heads:
        step = count // heads
        for b in range(0, batch, step):
            yield slice(b, b + step), slice(None)
        return
    for b in range(batch):
        for h in range(0, heads, count):
            yield slice(b, b + 1), slice(h, h + count)


def _like_query(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)


def _like_operands(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_LIBRARIES: list[torch.library.Library] = []
"""Held here, since a library takes its ops away where nobody holds it."""


def _ops() -> Any:
    """Forward and backward as ops: profilers and dispatch modes see one kernel each."""
    library = torch.library.Library("autoamp", "FRAGMENT")
    if not hasattr(torch.ops.autoamp, _NAMES[0]):
        kernels = ((_forward, _like_query), (_backward, _like_operands))
        for name, schema, (on_cpu, anywhere) in zip(
            _NAMES, _SCHEMAS, kernels, strict=True
        ):
            library.define(name + schema)
            library.impl(name, on_cpu, "CPU")
            library.impl(name, anywhere, "Meta")
        _LIBRARIES.append(library)
    return tuple(getattr(torch.ops.autoamp, name).default for name in _NAMES)


FORWARD, BACKWARD = _ops()
