"""Attention on CPUs with a backward in fp32, where a model calls torch's attention.

The mask, the factor and the flag of `scaled_dot_product_attention` are the steps
between the product and the softmax: a step multiplies the scores, adds numbers to them,
or fills some of them.

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

The backward here makes the weights by a softmax, and their average of themselves.
Scores, weights and their gradients are fp32, from products in fp32.  Where a CPU
multiplies bf16, the three products that make gradients read weights and gradients of
scores in bf16, as torch's kernel does; each of their results is rounded once.  It works
on some heads and some queries at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES


class Kind(IntEnum):
    """The kind of a step, as a number that an op can take."""

    SCALE = 0
    """Multiplies by `number`."""
    ADD = 1
    """Adds `tensor`."""
    FILL = 2
    """Puts `number` where `tensor`, of bools, is True."""
    KEEP = 3
    """Puts `number` where `tensor`, of bools, is False."""
    CAUSAL = 4
    """Puts `number` where the key comes after the query."""


WITH_TENSOR = frozenset({Kind.ADD, Kind.FILL, Kind.KEEP})


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        kind: the kind of change.
        number: the factor, or the number that is filled in.
        tensor: broadcasts to (batch, heads, queries, keys), with four dimensions.
    """

    kind: Kind
    number: float = 0.0
    tensor: Tensor | None = None

    def hidden_of(self, scores: Tensor, first: int = 0) -> Tensor:
        """Where a fill puts its number in `scores`, whose first query is `first`."""
        if self.kind is Kind.CAUSAL:
            return later_keys(scores.shape[-2], scores.shape[-1], first, scores)
        assert self.tensor is not None
        return self.tensor if self.kind is Kind.FILL else self.tensor.logical_not()

    def part(self, batches: slice, heads: slice, queries: slice, keys: slice) -> Step:
        """The step for a part of the scores."""
        if self.tensor is None:
            return self
        parts = (batches, heads, queries, keys)
        sizes = self.tensor.shape
        own = tuple(
            p if n > 1 else slice(None) for p, n in zip(parts, sizes, strict=True)
        )
        return Step(self.kind, self.number, self.tensor[own])


def steps_of(
    tensors: Sequence[Tensor], kinds: Sequence[int], numbers: Sequence[float]
) -> list[Step]:
    """The steps that an op was given: a tensor for each kind in `WITH_TENSOR`."""
    # All in four dimensions, as the scores are.
    parts = iter([t.view(*[1] * (4 - t.dim()), *t.shape) for t in tensors])
    return [
        Step(Kind(kind), number, next(parts) if kind in WITH_TENSOR else None)
        for kind, number in zip(kinds, numbers, strict=True)
    ]


def later_keys(queries: int, keys: int, first: int, like: Tensor) -> Tensor:
    """Where a key comes after the query, for queries from number `first` on."""
    ones = torch.ones(queries, keys, dtype=torch.bool, device=like.device)
    # The mask of a block begins at its first query.
    return ones.triu_(first + 1)


def stepped(
    scores: Tensor, steps: Sequence[Step], first: int = 0, *, in_place: bool = False
) -> Tensor:
    """The scores after all steps.

    Args:
        scores: (batch, heads, queries, keys).
        steps: in the order in which they were written.
        first: the number of the first of these queries.
        in_place: whether `scores` are written to; otherwise each step makes a tensor of
            its own, and the result is differentiable.
    """
    operands: tuple[Any, ...]
    for step in steps:
        if step.kind is Kind.SCALE:
            name, operands = "mul", (step.number,)
        elif step.kind is Kind.ADD:
            name, operands = "add", (step.tensor,)
        else:
            if in_place and step.kind is Kind.CAUSAL:
                # No query of the block comes before its first.
                _hide_later_keys_(scores[..., first:], step.number)
                continue
            hidden = step.hidden_of(scores, first)
            name, operands = "masked_fill", (hidden, step.number)
        scores = getattr(scores, f"{name}_" if in_place else name)(*operands)
    return scores


def _hide_later_keys_(scores: Tensor, number: float) -> None:
    """Puts `number` where a key comes after the query; the first of both are alike."""
    hidden = later_keys(scores.shape[-2], scores.shape[-1], 0, scores)
    if number == -torch.inf:
        # Eight times as fast as a fill on CPUs: 0.04 instead of 0.29 ms for 8 heads of
        # 256 queries.  The two differ for hidden scores of NaN or infinity alone, whose
        # keys make gradients NaN in any case.
        scores.add_(
            torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(hidden, number)
        )
    else:
        scores.masked_fill_(hidden, number)


def leading_scale(steps: Sequence[Step]) -> tuple[float, Sequence[Step]]:
    """The factor by which the first steps multiply, and the other steps.

    The factor is one that a product can take: a step that would make it 0 in fp32 is
    among the other steps.  With such a factor the kernels for low numbers write
    nothing, and leave their result as its memory was.
    """
    scale = 1.0
    for at, step in enumerate(steps):
        product = scale * step.number
        # `not`, as a NaN is no factor either.
        if step.kind is not Kind.SCALE or not abs(product) >= _TINY:
            return scale, steps[at:]
        scale = product
    return scale, ()


_TINY = torch.finfo(HIGH_DTYPE).tiny
"""The smallest factor that no kernel takes for 0."""


def hides_later_keys_alone(steps: Sequence[Step]) -> bool:
    """Whether steps do no more than multiply, and hide later keys by an infinity."""
    fills = [step for step in steps if step.kind is not Kind.SCALE]
    return bool(fills) and all(
        step.kind is Kind.CAUSAL and step.number == -torch.inf for step in fills
    )


def stepped_back_(slopes: Tensor, steps: Sequence[Step], first: int = 0) -> Tensor:
    """The gradient before all steps from the gradient after them, in place.

    No gradient flows to scores that were filled in, and no NaN of a query that sees no
    key.
    """
    if hides_later_keys_alone(steps):
        # Each query sees one key at least, so that no row is NaN, and the hidden scores
        # have slopes of 0 as they have no weight.
        steps = [step for step in steps if step.kind is Kind.SCALE]
    for step in reversed(steps):
        if step.kind is Kind.SCALE:
            slopes.mul_(step.number)
        elif step.kind is not Kind.ADD:
            slopes.masked_fill_(step.hidden_of(slopes, first), 0.0)
    return slopes


@dataclass(frozen=True)
class KernelScores:
    """Steps as torch's kernel takes them: `scores * scale + mask`.

    Attributes:
        scale: the factor of the scores.
        mask: numbers to add, in fp32 or in the dtype of the query, minus infinity where
            something is filled in; None for nothing.
        is_causal: whether later keys are hidden besides.
    """

    scale: float
    mask: Tensor | None
    is_causal: bool


def for_kernel(steps: Sequence[Step], query: Tensor, keys: int) -> KernelScores:
    """The steps as torch's kernel takes them, where filled scores are out of sight.

    Args:
        query: (batch, heads, queries, width).
        keys: the number of keys.
    """
    only_causal = all(step.kind in (Kind.SCALE, Kind.CAUSAL) for step in steps)
    scale = 1.0
    mask: Tensor | None = None
    for step in steps:
        if step.kind is Kind.SCALE:
            scale *= step.number
            mask = None if mask is None else mask * step.number
        elif step.kind is Kind.ADD:
            assert step.tensor is not None
            mask = step.tensor if mask is None else mask + step.tensor
        elif not only_causal:
            if step.kind is Kind.CAUSAL:
                hidden = later_keys(query.shape[-2], keys, 0, query)[None, None]
            else:
                hidden = step.hidden_of(query)
            # Whatever number the step fills in, such a score is out of sight: the
            # kernel's way to say so is minus infinity.
            if mask is None:
                mask = torch.zeros((), dtype=query.dtype, device=query.device)
            mask = torch.where(hidden, -torch.inf, mask)
    # Torch's kernel takes a mask in fp32, or in the dtype of the query.
    if mask is not None and mask.dtype != query.dtype:
        mask = mask.to(HIGH_DTYPE)
    causal = only_causal and any(step.kind is Kind.CAUSAL for step in steps)
    return KernelScores(scale, mask, causal)


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


_KERNELS = compat.cpu_attention()

_ROOM = 3 * 2**18
"""Operands and scores, in numbers, that one thread works on at a time.

Fewer would stay in the caches nearest to a core, but each part starts twenty kernels.
Chosen by timing on one CPU (AMD Zen 5)."""

_OPERANDS = frozenset({torch.bfloat16})
"""Low dtypes to which operands may be rounded: fp16 has no range for small ones."""

_FEW_KEYS = 32
"""Fewer keys than these are products too small for the units of a CPU."""

_FEWEST = 64
"""The fewest queries of a part: products of fewer rows are slow."""

_STAIRS, _LOW_STAIRS = 4, 2
"""Parts that the queries of causal attention are cut into, each with fewer keys."""


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
    operands = query, key, value
    # Torch's kernel divides by the numbers of queries and keys and by their width: a
    # division by 0 would end the process.
    if not (query.numel() and key.numel()):
        of_query, of_key, of_value = map(torch.zeros_like, operands)
        return of_query, of_key, of_value
    steps = steps_of(tensors, kinds, numbers)
    of_query, of_key, of_value = map(torch.empty_like, operands)
    # Models hand in heads that lie apart: they are moved once, and not for each part.
    given = [t.contiguous() for t in (grad, *operands)]
    held = _Held(query.dtype, key.shape[2])
    sums: _Sums | None = None
    for part in _parts(given, steps, held):
        weights = part.weights(held, safe=safe)
        # The average is of these weights themselves, not of the result rounded to 16
        # bits, whose error all scores of a query would share.
        found = _product(part.grad, part.value.mT, out=held.scores(weights.shape))
        # In place: each row is read before it is written.
        compat.softmax_gradient(found, weights, found)
        stepped_back_(part.scores(found), part.steps, part.first)
        if held.is_low:
            found = held.kept(found, part, "low found")
            weights = held.kept(weights, part, "low weights")
            if part.first > 0:
                continue
            # All rows of these heads are there, so that each sum is rounded once.
            part = part.with_all_rows()  # noqa: PLW2901
        _put(part.of(of_query), _product(found, part.key, part.scale))
        # Rows of keys are few and those of scores are many: a product with the scores
        # on its right has no scores to transpose.
        of_keys = _product(part.query.mT, found, part.scale)
        sums = _added(sums, of_keys, _product(part.grad.mT, weights))
        if part.first == 0:
            _put(of_key[part.heads], sums[0].mT)
            _put(of_value[part.heads], sums[1].mT)
            sums = None
    return of_query, of_key, of_value


def _put(whole: Tensor, rows: Tensor) -> None:
    """Writes rows of several batches and heads to a tensor of four dimensions."""
    whole.copy_(rows.view(whole.shape))


_Sums = tuple[Tensor, Tensor]
"""The gradients of keys and of values, each (batches and heads, width, keys)."""


def _added(sums: _Sums | None, *more: Tensor) -> _Sums:
    """Sums over all parts so far; each part sees the first keys of the part before."""
    if sums is None:
        return more[0], more[1]
    for total, own in zip(sums, more, strict=True):
        total[:, :, : own.shape[2]].add_(own)
    return sums


class _Held:
    """The dtype of the operands of products, and memory that all parts use in turn.

    Memory that the system hands out anew for each part takes longer to be mapped than
    the work on it: half of the time of a backward went there.

    Attributes:
        dtype: fp32, or the dtype of the data on a CPU that multiplies it.
    """

    def __init__(self, given: torch.dtype, keys: int) -> None:
        is_low = (
            given in _OPERANDS
            and given in compat.cpu_low_precision_units()
            and keys >= _FEW_KEYS
        )
        self.dtype = given if is_low else HIGH_DTYPE
        self._flat: dict[str, Tensor] = {}
        self._shaped: dict[tuple[str, Sequence[int]], Tensor] = {}

    @property
    def is_low(self) -> bool:
        """Whether products have low operands."""
        return self.dtype != HIGH_DTYPE

    def new(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in the memory of that name, whose numbers are lost thereby."""
        if (name, shape) not in self._shaped:
            size, flat = math.prod(shape), self._flat.get(name)
            if flat is None or flat.numel() < size:
                flat = self._flat[name] = torch.empty(size, dtype=dtype, device="cpu")
                # Views of the memory before would keep that memory.
                self._shaped = {k: v for k, v in self._shaped.items() if k[0] != name}
            self._shaped[name, shape] = flat[:size].view(shape)
        return self._shaped[name, shape]

    def scores(self, shape: Sequence[int]) -> Tensor:
        """The memory of scores, and then of the gradients of their weights."""
        return self.new("scores", shape, HIGH_DTYPE)

    def wide(self, rows: Tensor, name: str) -> Tensor:
        """Rows in fp32."""
        if rows.dtype == HIGH_DTYPE:
            return rows
        return self.new(name, rows.shape, HIGH_DTYPE).copy_(rows)

    def kept(self, scores: Tensor, part: _Part, name: str) -> Tensor:
        """Scores as operands of products, beside those of the other rows of the heads.

        Keys that the rows do not see have zeros.
        """
        shape = (scores.shape[0], *part.scores_of_heads)
        whole = self.new(name, shape, self.dtype)
        rows = whole[:, part.first : part.last]
        seen = scores.shape[2]
        rows[:, :, :seen].copy_(scores)
        if seen < shape[2]:
            rows[:, :, seen:].zero_()
        return whole


@dataclass(frozen=True)
class _Part:
    """Some heads, and some of their queries.

    Attributes:
        heads: the batches and heads.
        several: how many batches and heads that are.
        first, last: the numbers of the first query and of the one after the last.
        all_rows: gradient of the result, query and key of these heads, whole, in the
            dtype of operands.
        scale: the factor of the scores.
        grad, query: (batches and heads, queries, width), in fp32.
        key, value: (batches and heads, keys, width), of the keys that any query sees,
            in fp32.
        steps: the other steps of these scores.
    """

    heads: tuple[slice, slice]
    several: Sequence[int]
    first: int
    last: int
    all_rows: Sequence[Tensor]
    scale: float
    grad: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    steps: list[Step]

    @property
    def scores_of_heads(self) -> tuple[int, int]:
        """How many queries and keys the heads have."""
        _, query, key = self.all_rows
        return query.shape[1], key.shape[1]

    def with_all_rows(self) -> _Part:
        """All queries and keys of these heads as operands; values and steps stay."""
        grad, query, key = self.all_rows
        last = query.shape[1]
        return replace(self, first=0, last=last, grad=grad, query=query, key=key)

    def of(self, whole: Tensor) -> Tensor:
        """The part of a tensor that has a row for each query, in four dimensions."""
        return whole[(*self.heads, slice(self.first, self.last))]

    def scores(self, flat: Tensor) -> Tensor:
        """Scores in four dimensions."""
        return flat.view(*self.several, *flat.shape[1:])

    def weights(self, held: _Held, *, safe: bool = False) -> Tensor:
        """The weights in fp32, (batches and heads, queries, keys)."""
        shape = *self.query.shape[:2], self.key.shape[1]
        # Two products in bf16, the second of which gives what the first has rounded
        # away, would take six more passes over the scores.
        scores = _product(self.query, self.key.mT, self.scale, held.scores(shape))
        stepped(self.scores(scores), self.steps, self.first, in_place=True)
        into = held.new("weights", scores.shape, HIGH_DTYPE)
        torch.softmax(scores, -1, out=into)
        # A look at one weight of each query: `safe_softmax` makes three more passes
        # over all of them.
        if safe and into[:, :, :1].isnan().any():
            hidden = (scores == -torch.inf).all(-1, keepdim=True)
            into.masked_fill_(hidden, 0.0)
        return into


def _product(
    a: Tensor, b: Tensor, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """`scale * a @ b`, rounded once to the dtype of `a`; all have three dimensions.

    Args:
        out: where the result goes; else it has a memory of its own.
    """
    if out is None:
        out = a.new_empty(*a.shape[:2], b.shape[2])
    # With a beta of 0 the first operand is not read.
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _parts(
    given: Sequence[Tensor], steps: Sequence[Step], held: _Held
) -> Iterator[_Part]:
    """All of an attention, in parts that fit the caches together.

    Of each head the part with the last queries comes first.

    Args:
        given: the gradient of the result, query, key and value.
    """
    scale, steps = leading_scale(steps)
    _, query, key, _ = given
    queries, keys, width = query.shape[2], key.shape[2], query.shape[3]
    is_causal = hides_later_keys_alone(steps)
    # Causal queries are cut into steps, each of which leaves out the keys after its
    # last query.
    stairs = _LOW_STAIRS if held.is_low else _STAIRS
    rows = max(_FEWEST, -(-queries // stairs)) if is_causal else queries
    room = torch.get_num_threads() * _ROOM
    for heads in _some_heads(query, room // (width * (queries + keys) + rows * keys)):
        several = query[heads].shape[:2]
        own = [t[heads].reshape(-1, *t.shape[2:]) for t in given]
        wide = [held.wide(t, f"wide {n}") for n, t in enumerate(own)]
        all_rows = (own if held.is_low else wide)[:3]
        count = min(rows, max(_FEWEST, room // (keys * math.prod(several))))
        for first in reversed(range(0, queries, count)):
            last = min(first + count, queries)
            seen = slice(last if is_causal and last < queries else keys)
            less = [s.part(*heads, slice(first, last), seen) for s in steps]
            of_grad, of_query = (t[:, first:last] for t in wide[:2])
            of_key, of_value = (t[:, seen] for t in wide[2:])
            rows_given = of_grad, of_query, of_key, of_value
            of_heads = heads, several, first, last, all_rows, scale
            yield _Part(*of_heads, *rows_given, less)


def _some_heads(query: Tensor, count: int) -> Iterator[tuple[slice, slice]]:
    """All batches and heads, `count` heads at a time, or one for each thread."""
    batch, heads = query.shape[:2]
    # A product of fewer matrices than threads leaves threads idle.
    count = max(count, torch.get_num_threads())
    if count >= heads:
        step = count // heads
        for b in range(0, batch, step):
            yield slice(b, b + step), slice(None)
        return
    for b in range(batch):
        for h in range(0, heads, count):
            yield slice(b, b + 1), slice(h, h + count)


def _like_operands(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_LIBRARY = torch.library.Library("autoamp", "FRAGMENT")
"""Held here: torch unregisters a library's ops when the library is freed."""


def _op(name: str, schema: str, kernels: Mapping[str, Callable[..., Any]]) -> Any:
    """An op, one kernel to profilers and dispatch modes; from an earlier import or new.

    Args:
        kernels: by their dispatch keys.
    """
    if not hasattr(torch.ops.autoamp, name):
        _LIBRARY.define(name + schema)
        for key, kernel in kernels.items():
            _LIBRARY.impl(name, kernel, key)
    return getattr(torch.ops.autoamp, name).default


_TAKES = (
    "Tensor query, Tensor key, Tensor value, Tensor[] tensors, int[] kinds, "
    "float[] numbers"
)
BACKWARD = _op(
    "attention_backward",
    f"(Tensor grad, {_TAKES}, bool safe) -> (Tensor, Tensor, Tensor)",
    {"CPU": _backward, "Meta": _like_operands},
)


class _Attention(torch.autograd.Function):
    """Attention by steps, the gradients of which are computed in fp32.

    The forward is torch's kernel, which gives weights of 0 and not NaN to a query that
    a mask hides all keys from.
    """

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
        ctx.given = kinds, numbers
        ctx.save_for_backward(query, key, value, *tensors)
        assert _KERNELS is not None
        given = for_kernel(steps_of(tensors, kinds, numbers), query, key.shape[2])
        result, _ = _KERNELS[0](
            *(query, key, value, 0.0, given.is_causal),
            attn_mask=given.mask,
            scale=given.scale,
        )
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The saved tensors are read once: a checkpoint gives each only once.
        query, key, value, *tensors = ctx.saved_tensors
        kinds, numbers = ctx.given
        safe = bool(tensors)  # a query that sees no key has weights of 0
        rest = (None,) * (2 + len(tensors))
        if compat.needs_plain_ops(grad):
            steps = steps_of(tensors, kinds, numbers)
            again = functools.partial(written_out, steps=steps, safe=safe)
            found = compat.gradients_by_torch(again, grad, (query, key, value))
            return (*found, *rest)
        given = (grad, query, key, value, tensors, kinds, numbers, safe)
        return (*BACKWARD(*given), *rest)


_apply = compat.direct_apply(_Attention)


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_NODE = "ScaledDotProductFlashAttentionForCpu"
"""The name by which torch's graph of gradients calls the node of the kernel."""

_LOW = frozenset(LOW_DTYPES.values())
_PLAIN = (Tensor, torch.nn.Parameter, type(None))

LONG = 768
"""Queries from which on torch's kernel takes them in blocks of 256, and its backward in
16 bits is the faster one."""


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
    operands = query, key, value, attn_mask
    if (
        not (dropout_p or enable_gqa)
        and _fits(*operands)
        # A subclass, such as a DTensor, has its own attention.
        and all(type(t) in _PLAIN for t in operands)
        and not compat.transforms_active()
        and compat.runs_one_kernel(*operands, 0.0, is_causal, scale=scale)
    ):
        return _with_fp32_backward(*operands, is_causal, scale)
    return _ATTENTION(  # type: ignore[no-any-return]
        *operands, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


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
    """As `attention`, in a form AOT autograd traces.

    Torch's own attention is called in any case, as its kernel shows in the node that
    the call records; a compiler drops the call where nobody reads its result.
    """
    operands = query, key, value, attn_mask
    result: Tensor = _ATTENTION(
        *operands, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    node = result.grad_fn
    runs_kernel = node is not None and node.name().startswith(_NODE)
    if dropout_p or enable_gqa or not runs_kernel or not _fits(*operands):
        return result
    return _with_fp32_backward(*operands, is_causal, scale)


def _with_fp32_backward(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention by torch's kernel, whose changes of the scores are put as steps."""
    kinds: list[int] = [Kind.SCALE]
    numbers = [query.shape[-1] ** -0.5 if scale is None else scale]
    if mask is not None:
        kinds.append(Kind.KEEP if mask.dtype == torch.bool else Kind.ADD)
        numbers.append(-torch.inf)
    if is_causal:
        kinds.append(Kind.CAUSAL)
        numbers.append(-torch.inf)
    tensors = [] if mask is None else [mask]
    return _apply(query, key, value, kinds, numbers, *tensors)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the backward in fp32 computes this attention's gradients, and faster.

    Torch's own is taken where no gradient is recorded, on other devices, in fp32, and
    for `LONG` queries and more.
    """
    return (
        _KERNELS is not None
        and query.dtype in _LOW
        and query.is_cpu
        and query.dim() == 4
        and query.shape[2] < LONG
        and query.numel() > 0
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in (query, key, value))
        and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
    )


def attention_at(node: fx.Node, own: Callable[..., Any]) -> Any:
    """The function to call at a node: `own` for torch's attention in 16 bits on CPUs.

    Returns:
        The node's own target everywhere else.
    """
    if node.target is not _ATTENTION:
        return node.target
    value = node.meta["val"]
    is_low = value.dtype in _LOW
    return own if is_low and value.device.type == "cpu" else node.target
