"""What attention does to its scores between the product and the softmax, in steps.

A step multiplies the scores, adds numbers to them, or fills some of them.  Attention
that is written out keeps its steps as they were written: a fill stays a fill, and what
is added stays in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from autoamp.dtypes import HIGH_DTYPE


class Kind(IntEnum):
    """What a step does, as a number that an op can take."""

    SCALE = 0
    """Multiplies by `number`, which is above 0."""
    ADD = 1
    """Adds `tensor`."""
    FILL = 2
    """Puts `number` where `tensor`, of bools, is True."""
    KEEP = 3
    """Puts `number` where `tensor`, of bools, is False."""
    CAUSAL = 4
    """Puts `number` where the key comes after the query."""


WITH_TENSOR = frozenset({Kind.ADD, Kind.FILL, Kind.KEEP})
FILLS = frozenset({Kind.FILL, Kind.KEEP, Kind.CAUSAL})


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
    given = iter(tensors)
    return [
        Step(
            Kind(kind),
            number,
            _with_four(next(given)) if kind in WITH_TENSOR else None,
        )
        for kind, number in zip(kinds, numbers, strict=True)
    ]


def _with_four(tensor: Tensor) -> Tensor:
    more = 4 - tensor.dim()
    return tensor.view(*[1] * more, *tensor.shape) if more else tensor


def later_keys(queries: int, keys: int, first: int, like: Tensor) -> Tensor:
    """Where a key comes after the query, for queries from number `first` on."""
    ones = torch.ones(queries, keys, dtype=torch.bool, device=like.device)
    return ones.triu_(first + 1)


def stepped(scores: Tensor, steps: Sequence[Step], first: int = 0) -> Tensor:
    """The scores after all steps, each a tensor of its own, differentiable.

    Args:
        scores: (batch, heads, queries, keys).
        steps: in the order in which they were written.
        first: the number of the first of these queries.
    """
    for step in steps:
        if step.kind is Kind.SCALE:
            scores = scores * step.number
        elif step.kind is Kind.ADD:
            scores = scores + step.tensor  # type: ignore[operator]
        else:
            scores = scores.masked_fill(step.hidden_of(scores, first), step.number)
    return scores


def stepped_(scores: Tensor, steps: Sequence[Step], first: int = 0) -> Tensor:
    """As `stepped`, in place."""
    for step in steps:
        if step.kind is Kind.SCALE:
            scores.mul_(step.number)
        elif step.kind is Kind.ADD:
            scores.add_(step.tensor)  # type: ignore[arg-type]
        else:
            scores.masked_fill_(step.hidden_of(scores, first), step.number)
    return scores


def leading_scale(steps: Sequence[Step]) -> tuple[float, Sequence[Step]]:
    """The factor by which the first steps multiply, and the other steps."""
    scale = 1.0
    for at, step in enumerate(steps):
        if step.kind is not Kind.SCALE:
            return scale, steps[at:]
        scale *= step.number
    return scale, ()


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
    If later keys alone are hidden, each query sees one, and the others have no weight.
    """
    if hides_later_keys_alone(steps):
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
        filled: the largest number that filled scores end as; minus infinity for none.
    """

    scale: float
    mask: Tensor | None
    is_causal: bool
    filled: float


def for_kernel(steps: Sequence[Step], query: Tensor, keys: int) -> KernelScores:
    """The steps as torch's kernel takes them, where filled scores are out of sight.

    Args:
        query: (batch, heads, queries, width).
        keys: the number of keys.
    """
    only_causal = all(step.kind in (Kind.SCALE, Kind.CAUSAL) for step in steps)
    scale, filled = 1.0, -torch.inf
    mask: Tensor | None = None
    for step in steps:
        if step.kind is Kind.SCALE:
            scale, filled = scale * step.number, filled * step.number
            mask = None if mask is None else mask * step.number
        elif step.kind is Kind.ADD:
            assert step.tensor is not None
            mask = step.tensor if mask is None else mask + step.tensor
            if filled > -torch.inf:
                filled += float(step.tensor.max())
        else:
            filled = max(filled, step.number)
            if not only_causal:
                mask = _hiding(mask, step, query, keys)
    if mask is not None and mask.dtype != query.dtype:
        mask = mask.to(HIGH_DTYPE)
    causal = only_causal and any(step.kind is Kind.CAUSAL for step in steps)
    return KernelScores(scale, mask, causal, filled)


def _hiding(mask: Tensor | None, step: Step, query: Tensor, keys: int) -> Tensor:
    """`mask` with minus infinity where a step fills in its number."""
    if step.kind is Kind.CAUSAL:
        hidden = later_keys(query.shape[-2], keys, 0, query)[None, None]
    else:
        hidden = step.hidden_of(query)
    if mask is None:
        mask = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(hidden, -torch.inf, mask)
