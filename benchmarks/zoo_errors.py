"""Errors of one model of the zoo beside its peers', on a few batches and on many.

The peers are autocast and fp32 arithmetic with rounded weights, below whose errors
nothing that lowers weights can stay.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from .errors import (
    Step,
    has_finite_grads,
    output_and_grad_errors,
    relative_error,
    scaled_step,
    training_step,
)
from .metrics import ModelCase, with_rounded_weights, without_onednn

BF16, FP16 = torch.bfloat16, torch.float16
SHORT = {BF16: "bf16", FP16: "fp16"}
MARGIN = 1.1
"""How many times a peer's error ours may be.

What type promotion leaves fp32 is fp32 here, so most models have autocast's bits; where
an op below that line stays fp32 all the same, the two errors are draws of chance."""
MANY = tuple(range(16))
"""Batches of a second look."""
MOST_ROUNDS = 20
"""Of steps on all batches, each of which halves the loss scale while it must."""

Kind = Literal["output", "grad", "inference"]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Pair:
    """One error of the converted model and of autocast, and the most it may be.

    Of a second look: `batches` is their number, and the errors are medians.
    """

    ours: float
    autocast: float
    limit: float
    batches: int | None = None

    @property
    def ratio(self) -> float:
        """Ours over the limit: at most 1 where it is kept."""
        return self.ours / self.limit if self.limit else float(self.ours > 0)


def pair(
    ours: float, autocast: float, rounded: float, *, batches: int | None = None
) -> Pair:
    """An error and its limit, `MARGIN` times the larger of the peers'."""
    peers = [e for e in (autocast, rounded) if math.isfinite(e)]
    return Pair(ours, autocast, MARGIN * max(peers, default=0.0), batches)


@dataclass(frozen=True)
class Taken:
    """What a model and its peers gave for the same batches, as lists of equal length.

    `failure` says why autocast could not run the case: then the yardstick is torch's
    own kernels, or the whole model in the low dtype.  `scale` is the loss scale, and
    `gradients` the dtypes of our gradients.
    """

    expected: list[Any]
    ours: list[Any]
    autocast: list[Any]
    rounded: list[Any]
    failure: str = ""
    scale: float = 1.0
    gradients: frozenset[torch.dtype] = frozenset()


def second_look(case: ModelCase, dtype: torch.dtype, kind: Kind) -> Pair:
    """The same error over many batches, whose medians are compared.

    In the mean of a few one batch outweighs all others where rounding makes a choice
    fall the other way, a router's between experts or a relu's, and which batch that
    is, and whether ours or autocast's, is chance.
    """
    if kind == "inference":
        taken = asked(case, dtype, MANY)
        pick: Callable[..., float] = relative_error
    else:
        taken = trained(case, dtype, MANY)
        place = ("output", "grad").index(kind)

        def pick(step: Step, reference: Step) -> float:
            return output_and_grad_errors([step], [reference])[place]

    def middle(found: list[Any]) -> float:
        return median(map(pick, found, taken.expected))

    ours, autocast, rounded = map(middle, (taken.ours, taken.autocast, taken.rounded))
    return pair(ours, autocast, rounded, batches=len(MANY))


# -- inference -------------------------------------------------------------------------


def asked(case: ModelCase, dtype: torch.dtype, seeds: Sequence[int]) -> Taken:
    """Outputs in evaluation mode under `torch.inference_mode`, one for each batch."""
    original = case.model().eval()
    run = partial(outputs, case, seeds)
    amp, failure = _peer(run, original, dtype)
    ours = run(convert(copy.deepcopy(original), dtype))
    return Taken(
        run(original), ours, amp, run(with_rounded_weights(original, dtype)), failure
    )


def outputs(
    case: ModelCase,
    seeds: Sequence[int],
    model: nn.Module,
    context: Context = nullcontext,
    mode: Context = torch.inference_mode,
) -> list[Any]:
    """What the model gives for each batch."""
    found = []
    for seed in seeds:
        args, kwargs = copy.deepcopy(case.inputs(seed))
        with mode(), context():
            found.append(model(*args, **kwargs))
    return found


# -- training --------------------------------------------------------------------------


def trained(case: ModelCase, dtype: torch.dtype, seeds: Sequence[int]) -> Taken:
    """Steps, one for each batch; in fp16 once the loss scale has found its place."""
    original = case.model()
    settled = _settled(case, original, dtype, seeds)
    run = partial(_steps, case, seeds)
    ours = run(settled.model)
    amp, failure = _peer(partial(_finite, run, settled.scale), original, dtype)
    return Taken(
        run(copy.deepcopy(original)),
        ours,
        amp,
        run(with_rounded_weights(original, dtype)),
        failure,
        settled.scale,
        gradients_of(settled.model),
    )


def gradients_of(model: nn.Module) -> frozenset[torch.dtype]:
    """The dtypes of the model's gradients."""
    return frozenset(p.grad.dtype for p in model.parameters() if p.grad is not None)


class _Settled(NamedTuple):
    """A model whose loss scale is in force as long as its optimizer lives."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scale: float


def _settled(
    case: ModelCase, original: nn.Module, dtype: torch.dtype, seeds: Sequence[int]
) -> _Settled:
    """The converted model once a round of steps skips none; no step moves it."""
    import autoamp

    start = copy.deepcopy(original.state_dict())
    model = convert(copy.deepcopy(original), dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if dtype is not FP16:
        return _Settled(model, optimizer, 1.0)
    for _ in range(MOST_ROUNDS):
        skipped = [_step_is_skipped(case, model, optimizer, seed) for seed in seeds]
        if not any(skipped):
            break
    model.load_state_dict(start)
    scaling = autoamp.report(model).loss_scale
    return _Settled(model, optimizer, scaling.scale if scaling else 1.0)


def _step_is_skipped(
    case: ModelCase, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int
) -> bool:
    training_step(model, case.loss, case.inputs(seed), seed=seed)
    optimizer.step()
    return bool(optimizer.step_was_skipped)


def _finite(
    steps: Callable[..., list[Step]], scale: float, model: nn.Module, context: Context
) -> list[Step]:
    """Autocast's steps at the largest loss scale at which it stays finite."""
    while True:
        found = steps(model, context, scale)
        if all(map(has_finite_grads, found)) or scale <= 1:
            return found
        scale /= 2


def _steps(
    case: ModelCase,
    seeds: Sequence[int],
    model: nn.Module,
    context: Context = nullcontext,
    scale: float = 1.0,
) -> list[Step]:
    """A step on each batch, all at one loss scale."""
    return [
        scaled_step(
            model, case.loss, case.inputs(seed), scale, context=context, seed=seed
        )
        for seed in seeds
    ]


# -- the models ------------------------------------------------------------------------


def convert(model: nn.Module, dtype: torch.dtype, **options: Any) -> nn.Module:
    """The model converted wherever the rules allow, on pain of an error."""
    import autoamp

    converted: nn.Module = autoamp.convert(
        model, precision=SHORT[dtype], do_no_harm=False, strict=True, **options
    )
    return converted


def autocast(dtype: torch.dtype) -> Context:
    """A context manager to be made for each call."""
    return lambda: torch.autocast("cpu", dtype)


def _peer(
    run: Callable[[nn.Module, Context], list[Any]], model: nn.Module, dtype: torch.dtype
) -> tuple[list[Any], str]:
    """What `run` gives under autocast, and why not where autocast fails."""
    context = autocast(dtype)
    try:
        return run(copy.deepcopy(model), context), ""
    except RuntimeError as error:
        failure = str(error).splitlines()[0]
    try:
        with without_onednn():
            return run(copy.deepcopy(model), context), failure
    except RuntimeError:
        return run(copy.deepcopy(model).to(dtype), nullcontext), failure
