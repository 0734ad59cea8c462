"""One model in fp32, under `torch.autocast` and converted: errors, casts, flops, bytes.

The instruments are in the modules beside this; this one lines them up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from autoamp.passes.check.saved_bytes import SavedBytes, saved_bytes
from autoamp.tools.count import Counts, count_ops

from .errors import (
    Batch,
    Loss,
    Step,
    float_leaves,
    output_and_grad_errors,
    training_step,
)

SEEDS = (0, 1, 2, 3)
"""Batches per comparison; with one or two, the error of a batch is mostly chance."""

MARGIN = 1.25
"""How many times autocast's error a converted model's may be."""

Context = Callable[[], AbstractContextManager[Any]]
Taken = TypeVar("Taken")


class ModelCase(Protocol):
    """What `measure` needs of a case; `tests.models.Case` is one."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Callable[[int], Batch]: ...
    @property
    def loss(self) -> Loss: ...
    def model(self, seed: int = 0) -> nn.Module: ...


@dataclass(frozen=True)
class Figures:
    """What was measured of one way to run a model.

    `runs_gained` holds, per forward, by how much the caller's counter of runs grew.
    """

    output_error: float
    grad_error: float
    counts: Counts
    saved: SavedBytes
    output_dtypes: tuple[torch.dtype, ...]
    steps: tuple[Step, ...]
    runs_gained: tuple[int, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """One case measured four ways.

    `rounded` is fp32 arithmetic with the weights rounded to bf16: the error no low
    precision can avoid.  Where autocast cannot run the case on this machine,
    `autocast_failure` says why, and `autocast` was measured with oneDNN switched off
    or, where that fails too, is the whole model in `dtype` instead: a yardstick for
    errors, not for what it ran.
    """

    name: str
    fp32: Figures
    rounded: Figures
    autocast: Figures
    converted: Figures
    autocast_failure: str = ""

    def error_limit(self, kind: str) -> float:
        """The largest "output" or "grad" error allowed of the converted model.

        `MARGIN` times autocast's; and where rounding the weights alone is worse than
        autocast (a chaotic network, or one whose weights autocast does not touch),
        `MARGIN` times that, since nothing that lowers weights can stay below it.
        """
        field = f"{kind}_error"
        peers = (self.rounded, self.autocast)
        return MARGIN * max(getattr(peer, field) for peer in peers)


def measure(
    case: ModelCase,
    model: nn.Module,
    references: tuple[Step, ...] | None = None,
    *,
    context: Context = nullcontext,
    runs: Callable[[nn.Module], int] | None = None,
    device: str = "cpu",
) -> Figures:
    """Runs `model` on the case's batches, then once counted and once with hooks.

    Args:
        case: Gives the batches and the loss.
        model: The model to run, in training mode; its buffers move.
        references: fp32 steps on the same batches; None means the errors are zero.
        context: Entered round each forward, such as `torch.autocast`.
        runs: Counter read before and after each forward.
        device: Where the batches are put.
    """
    gained: list[int] = []

    def step(seed: int) -> Step:
        before = runs(model) if runs else 0
        batch = to_device(case.inputs(seed), device)
        done = training_step(model, case.loss, batch, context=context, seed=seed)
        if runs:
            gained.append(runs(model) - before)
        return done

    steps = tuple(step(seed) for seed in SEEDS)
    errors = output_and_grad_errors(steps, references) if references else (0.0, 0.0)
    parameters = list(model.parameters())
    # As after an optimizer step: copies of the weights kept between calls are stale.
    with torch.no_grad():
        for p in parameters:
            p.add_(0)
    counts = count_ops(partial(step, SEEDS[0]), parameters)
    args, kwargs = to_device(case.inputs(SEEDS[0]), device)

    def forward() -> Any:
        with context():
            output = model(*args, **kwargs)
        return case.loss(output), output

    saved = saved_bytes(forward, parameters)
    dtypes = tuple(t.dtype for t in float_leaves(steps[0].output))
    return Figures(*errors, counts, saved, dtypes, steps, tuple(gained))


def compare_with_autocast(
    case: ModelCase,
    convert: Callable[[nn.Module], nn.Module],
    *,
    runs: Callable[[nn.Module], int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Comparison:
    """Measures `case` in fp32, with rounded weights, under autocast, and converted."""
    original = case.model().to(device)
    take = partial(measure, case, device=device)
    fp32 = take(copy.deepcopy(original))
    references = fp32.steps

    rounded = take(with_rounded_weights(original, dtype), references)

    def run(model: nn.Module, context: Context) -> Figures:
        return take(model, references, context=context)

    amp, failure = under_autocast(run, original, dtype, device)
    converted = take(convert(copy.deepcopy(original)), references, runs=runs)
    return Comparison(case.name, fp32, rounded, amp, converted, failure)


def under_autocast(
    run: Callable[[nn.Module, Context], Taken],
    model: nn.Module,
    dtype: torch.dtype,
    device: str = "cpu",
) -> tuple[Taken, str]:
    """What `run` gives of a copy under autocast, and why not where autocast fails.

    What it gives without oneDNN stands for it then, or of the whole model in `dtype`.
    """
    context = partial(torch.autocast, device, dtype)
    try:
        return run(copy.deepcopy(model), context), ""
    except RuntimeError as error:
        # oneDNN has no bf16 LSTM for a CPU without bf16 units; torch's own code does.
        failure = str(error).splitlines()[0]
    try:
        with without_onednn():
            return run(copy.deepcopy(model), context), failure
    except RuntimeError:
        return run(copy.deepcopy(model).to(dtype), nullcontext), failure


@contextmanager
def without_onednn() -> Iterator[None]:
    """Runs torch's own CPU kernels inside (`torch.backends.mkldnn.flags` warns)."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def to_device(batch: Batch, device: str) -> Batch:
    """The batch with its tensors on `device`."""
    moved: Batch = torch.utils._pytree.tree_map_only(
        Tensor, lambda t: t.to(device), batch
    )
    return moved


def with_rounded_weights(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose fp32 weights have been through `dtype`; it computes in fp32."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            if p.dtype == torch.float32:
                p.copy_(p.to(dtype))
    return model
