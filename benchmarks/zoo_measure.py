"""One model of the zoo: trained and asked, in bf16 and in fp16, beside autocast.

Errors are set beside those of autocast and of fp32 arithmetic with rounded weights,
below whose errors nothing that lowers weights can stay; on a few batches and, where
ours are above the limit, on many.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import autoamp
from autoamp.passes.check.saved_bytes import saved_bytes
from autoamp.tools.count import count_ops

from .errors import (
    Step,
    has_finite_grads,
    output_and_grad_errors,
    relative_error,
    scaled_step,
    training_step,
)
from .metrics import (
    SEEDS,
    Context,
    ModelCase,
    compare_with_autocast,
    under_autocast,
    with_rounded_weights,
)
from .shortfalls import cost_shortfalls

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
    amp, failure = under_autocast(run, original, dtype)
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
    at_scale = partial(_finite, run, settled.scale)
    amp, failure = under_autocast(at_scale, original, dtype)
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
    converted: nn.Module = autoamp.convert(
        model, precision=SHORT[dtype], do_no_harm=False, strict=True, **options
    )
    return converted


# -- a row ----------------------------------------------------------------------------


@dataclass
class Row:
    """What was seen of one model; plain values, to be sent between processes.

    `saved_for_memory` is what it saves placed with `objective="memory"`, measured where
    the default, which places for time, saves more than autocast.
    """

    name: str
    graphs: int = 0
    unchanged: int = 0
    casts: tuple[int, int] = (0, 0)
    casts_inference: tuple[int, int] = (0, 0)
    saved: tuple[int, int] = (0, 0)
    saved_for_memory: int | None = None
    low_share: tuple[float, float] = (0.0, 0.0)
    errors: dict[str, Pair] = field(default_factory=dict)
    loss_scale: float = 0.0
    autocast_failures: dict[str, str] = field(default_factory=dict)
    shortfalls: list[str] = field(default_factory=list)

    def expect(self, holds: bool, text: str) -> None:
        """Adds a shortfall unless `holds`."""
        if not holds:
            self.shortfalls.append(f"{self.name}: {text}")


def measure(case: ModelCase) -> Row:
    """Trains and asks the model of `case` in both dtypes."""
    row = Row(case.name)
    _training_bf16(case, row)
    for dtype in (BF16, FP16):
        _inference(case, dtype, row)
    _training_fp16(case, row)
    return row


def _compare(
    case: ModelCase, row: Row, dtype: torch.dtype, kind: Kind, found: Pair
) -> None:
    """Records an error; one above its limit gets a second look."""
    if found.ratio > 1:
        found = second_look(case, dtype, kind)
    name = f"{SHORT[dtype]} {kind}"
    row.errors[name] = found
    ours, limit = f"{found.ours:.3g}", f"{found.limit:.3g}"
    row.expect(found.ratio <= 1, f"{name} error {ours} > {limit}")


# -- training in bf16 ------------------------------------------------------------------


def _training_bf16(case: ModelCase, row: Row) -> None:
    made: list[nn.Module] = []

    def keep(model: nn.Module) -> nn.Module:
        made.append(convert(model, BF16))
        return made[0]

    record = compare_with_autocast(case, keep, runs=_runs)
    ours, amp = record.converted, record.autocast
    report = autoamp.report(made[0])
    row.graphs, row.unchanged = len(report.graphs), len(report.skipped)
    row.casts = (ours.counts.total_casts, amp.counts.total_casts)
    row.saved = (ours.saved.total, amp.saved.total)
    row.low_share = (ours.counts.low_share, amp.counts.low_share)
    if record.autocast_failure:
        row.autocast_failures["bf16"] = record.autocast_failure
    spare = _bytes_of_exact_norms(report)
    found = cost_shortfalls(record, spare_bytes=spare)
    if not record.autocast_failure and row.saved[0] > row.saved[1] + spare:
        row.saved_for_memory = _saved_for_memory(case)
        if row.saved_for_memory <= row.saved[1] + spare:
            found = [s for s in found if "saved bytes" not in s]
    row.shortfalls += found
    kinds = gradients_of(made[0])
    row.expect(kinds == {torch.float32}, f"bf16 gradients are {kinds}")
    ways = (ours, amp, record.rounded)
    _compare(case, row, BF16, "output", pair(*(way.output_error for way in ways)))
    _compare(case, row, BF16, "grad", pair(*(way.grad_error for way in ways)))


def _runs(model: nn.Module) -> int:
    return int(autoamp.report(model).runs)


def _saved_for_memory(case: ModelCase) -> int:
    """Bytes saved by the model when it is placed to save few."""
    model = convert(case.model(), BF16, objective="memory")
    args, kwargs = case.inputs(SEEDS[0])

    def forward() -> Any:
        output = model(*args, **kwargs)
        return case.loss(output), output

    forward()  # captures
    return saved_bytes(forward, model.parameters()).total


def _bytes_of_exact_norms(report: Any) -> int:
    """What norms save more than under autocast where a rule keeps them fp32.

    Norms of norms, norms that begin a residual stream, and layer_norm over many rows on
    a CPU (docs/how-it-works.md): they read and write four bytes an element each, and
    save what they read in four bytes an element where autocast saves it in two.
    """
    return sum(
        row.bytes // 4
        for row in report.ops
        if row.origin in ("surroundings", "autoamp") and "norm" in row.op
    )


# -- inference -------------------------------------------------------------------------


def _inference(case: ModelCase, dtype: torch.dtype, row: Row) -> None:
    taken = asked(case, dtype, SEEDS)
    kind = f"{SHORT[dtype]} inference"
    if taken.failure:
        row.autocast_failures[kind] = taken.failure
    peers = (taken.ours, taken.autocast, taken.rounded)
    found = pair(*(relative_error(given, taken.expected) for given in peers))
    _compare(case, row, dtype, "inference", found)
    wanted, got = _dtypes(taken.expected), _dtypes(taken.ours)
    row.expect(got == wanted, f"{kind} gives {got}, in fp32 {wanted}")
    if dtype is BF16 and not taken.failure:
        original = case.model().eval()
        converted = convert(case.model().eval(), dtype)
        # Under inference_mode the counter meets composite operators whole, below
        # autocast, which can then not cast what they call.
        counted = partial(outputs, case, SEEDS, mode=torch.no_grad)
        counted(converted)  # captures
        row.casts_inference = (
            _casts(partial(counted, converted), converted),
            _casts(
                partial(counted, original, partial(torch.autocast, "cpu", dtype)),
                original,
            ),
        )
        mine, theirs = row.casts_inference
        row.expect(mine <= theirs, f"{kind} casts {mine} > autocast's {theirs}")


def _dtypes(tree: Any) -> list[torch.dtype]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [t.dtype for t in leaves if isinstance(t, Tensor)]


def _casts(call: Callable[[], Any], model: nn.Module) -> int:
    return count_ops(call, model.parameters()).total_casts


# -- training in fp16 ------------------------------------------------------------------


def _training_fp16(case: ModelCase, row: Row) -> None:
    """Gradients at true scale, finite, once the loss scale has found its place."""
    taken: Taken = trained(case, FP16, SEEDS)
    row.loss_scale = taken.scale
    if taken.failure:
        row.autocast_failures["fp16"] = taken.failure
    errors = [
        output_and_grad_errors(steps, taken.expected)
        for steps in (taken.ours, taken.autocast, taken.rounded)
    ]
    _compare(case, row, FP16, "output", pair(*(output for output, _ in errors)))
    _compare(case, row, FP16, "grad", pair(*(grad for _, grad in errors)))
    found = [g for step in taken.ours for g in step.grads.values()]
    row.expect(all(bool(g.isfinite().all()) for g in found), "fp16 gradients overflow")
    kinds = taken.gradients
    row.expect(kinds == {torch.float32}, f"fp16 gradients are {kinds}")
