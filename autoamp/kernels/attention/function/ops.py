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
from autoamp.kernels.attention.function.scores import (
    KernelScores,
    Step,
    for_kernel,
    hides_later_keys_alone,
    leading_scale,
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

_STAIRS = 4
"""Parts that the queries of causal attention are cut into, each with fewer keys."""

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

    The kernel hides the scores that the model fills with a number.  The result is the
    same if in every row the filled scores are so far below the others that their weight
    is 0 in fp32; the kernel's own logarithms of the sums tell whether they are.
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
    sums: tuple[Tensor, Tensor] | None = None
    for part in _parts(query, key, value, steps):
        slopes = _wide(part.of(grad))
        weights = part.weights(safe=safe)
        found = compat.softmax_gradient(slopes @ part.value.mT, weights)
        stepped_back_(found, part.steps, part.first)
        torch.mul(found @ part.key, part.scale, out=part.of(of_query))
        some = found.mT @ part.query, weights.mT @ slopes
        if part.is_last:  # it sees all keys
            for whole, total, own in zip(
                (of_key, of_value), sums or some, some, strict=True
            ):
                whole[part.heads].copy_(own if sums is None else total.add_(own))
            sums = None
        elif sums is None:
            sums = tuple(_with_room(own, key.shape[2]) for own in some)  # type: ignore[assignment]
        else:
            for total, own in zip(sums, some, strict=True):
                total[:, :, : own.shape[2]].add_(own)
    return of_query, of_key, of_value


def _with_room(some: Tensor, keys: int) -> Tensor:
    """Sums for the first keys, and zeros for the others."""
    missing = keys - some.shape[2]
    return torch.nn.functional.pad(some, (0, 0, 0, missing)) if missing else some


@dataclass(frozen=True)
class _Part:
    """Some heads, and some of their queries, in fp32.

    Attributes:
        heads: the batches and heads.
        first, last: the numbers of the first query and of the one after the last.
        is_last: whether these are the last queries of their heads.
        scale: the factor that `query` has been multiplied by.
        query: (batches, heads, queries, width).
        key, value: (batches, heads, keys, width), of the keys that any query sees.
        steps: the other steps of these scores.
    """

    heads: tuple[slice, slice]
    first: int
    last: int
    is_last: bool
    scale: float
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
    scale, steps = leading_scale(steps)
    queries, keys, width = query.shape[2], key.shape[2], query.shape[3]
    is_causal = hides_later_keys_alone(steps)
    rows = max(_FEWEST, -(-queries // _STAIRS)) if is_causal else queries
    threads = torch.get_num_threads()
    room = threads * _CACHE // (2 * HIGH_DTYPE.itemsize)
    for heads in _some_heads(query, room // (width * (queries + keys) + rows * keys)):
        wide = [_wide(t[heads]) for t in (query, key, value)]
        wide[0] = wide[0] * scale
        count = min(rows, max(_FEWEST, room // (keys * wide[0].shape[:2].numel())))
        for first in range(0, queries, count):
            last = min(first + count, queries)
            is_last = last == queries
            seen = slice(last if is_causal and not is_last else keys)
            own = [s.part(*heads, slice(first, last), seen) for s in steps]
            given = wide[0][:, :, first:last], wide[1][:, :, seen], wide[2][:, :, seen]
            yield _Part(heads, first, last, is_last, scale, *given, own)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(HIGH_DTYPE, memory_format=torch.contiguous_format)


def _some_heads(query: Tensor, count: int) -> Iterator[tuple[slice, slice]]:
    """All batches and heads, `count` heads at a time, or one for each thread."""
    batch, heads = query.shape[:2]
    count = max(count, torch.get_num_threads())
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
