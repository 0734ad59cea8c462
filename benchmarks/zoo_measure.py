"""One model of the zoo: trained and asked, in bf16 and in fp16, beside autocast."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .conformance import shortfalls
from .counting import count_ops
from .errors import Step, output_and_grad_errors, relative_error, training_step
from .metrics import SEEDS, ModelCase, compare_with_autocast, without_onednn
from .saved import saved_bytes

BF16, FP16 = torch.bfloat16, torch.float16
SHORT = {BF16: "bf16", FP16: "fp16"}
MARGIN = math.sqrt(2)
"""How many times a peer's error ours may be.

Where autocast rounds a value once, the fp32 result of a norm on its way to a product,
we round it going into the norm and coming out, which saves half the norm's bytes: two
independent roundings of one size are worth the square root of two of one.
"""
MOST_ROUNDS = 20
"""Of steps on all batches, each of which halves the loss scale while it must."""


@dataclass(frozen=True)
class Pair:
    """One figure of the converted model and of its peer, and the most it may be."""

    ours: float
    autocast: float
    limit: float

    @property
    def ratio(self) -> float:
        """Ours over the limit: at most 1 where it is kept."""
        return self.ours / self.limit if self.limit else float(self.ours > 0)


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

    def compare(self, kind: str, ours: float, peers: list[float]) -> None:
        """Records an error beside the peers': autocast's first, then other limits."""
        limits = [peer for peer in peers if math.isfinite(peer)]
        pair = Pair(ours, peers[0], MARGIN * max(limits, default=0.0))
        self.errors[kind] = pair
        self.expect(ours <= pair.limit, f"{kind} error {ours:.3g} > {pair.limit:.3g}")


def measure(case: ModelCase) -> Row:
    """Trains and asks the model of `case` in both dtypes."""
    row = Row(case.name)
    _training_bf16(case, row)
    for dtype in (BF16, FP16):
        _inference(case, dtype, row)
    _training_fp16(case, row)
    return row


def convert(model: nn.Module, dtype: torch.dtype, **options: Any) -> nn.Module:
    """The model converted wherever the rules allow, on pain of an error."""
    import autoamp

    converted: nn.Module = autoamp.convert(
        model, precision=SHORT[dtype], do_no_harm=False, strict=True, **options
    )
    return converted


def _runs(model: nn.Module) -> int:
    import autoamp

    return int(autoamp.report(model).runs)


def _training_bf16(case: ModelCase, row: Row) -> None:
    import autoamp

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
    for kind in ("output", "grad"):
        error, limit = getattr(ours, f"{kind}_error"), record.error_limit(kind, MARGIN)
        row.errors[f"bf16 {kind}"] = Pair(error, getattr(amp, f"{kind}_error"), limit)
    if record.autocast_failure:
        row.autocast_failures["bf16"] = record.autocast_failure
    spare = _bytes_of_exact_norms(report)
    found = shortfalls(record, margin=MARGIN, spare_bytes=spare)
    if not record.autocast_failure and row.saved[0] > row.saved[1] + spare:
        row.saved_for_memory = _saved_for_memory(case)
        if row.saved_for_memory <= row.saved[1] + spare:
            found = [s for s in found if "saved bytes" not in s]
    row.shortfalls += found
    kinds = {p.grad.dtype for p in made[0].parameters() if p.grad is not None}
    row.expect(kinds == {torch.float32}, f"bf16 gradients are {kinds}")


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

    Norms of norms, and layer_norm over many rows on a CPU (docs/how-it-works.md): they
    read and write four bytes an element each, and save what they read in four bytes an
    element where autocast saves it in two.
    """
    return sum(
        row.bytes // 4
        for row in report.ops
        if row.origin in ("surroundings", "autoamp") and "norm" in row.op
    )


def _autocast(dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch.autocast("cpu", dtype)


def _whole(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(model).to(dtype)


def _rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose weights have been through `dtype`; it computes in fp32."""
    return _whole(model, dtype).float()


def _peer(
    run: Callable[[nn.Module, Callable[[], AbstractContextManager[Any]]], Any],
    model: nn.Module,
    dtype: torch.dtype,
) -> tuple[Any, str]:
    """What `run` gives under autocast, and why not where autocast fails.

    Then the yardstick is torch's own kernels, or the whole model in `dtype`.
    """
    context = _autocast(dtype)
    try:
        return run(copy.deepcopy(model), context), ""
    except RuntimeError as error:
        failure = str(error).splitlines()[0]
    try:
        with without_onednn():
            return run(copy.deepcopy(model), context), failure
    except RuntimeError:
        return run(_whole(model, dtype), nullcontext), failure


# -- inference -------------------------------------------------------------------------


def _inference(case: ModelCase, dtype: torch.dtype, row: Row) -> None:
    """Outputs of the model in evaluation mode, under `torch.inference_mode`."""
    original = case.model().eval()
    converted = convert(copy.deepcopy(original), dtype)

    def outputs(model: nn.Module, context: Any = nullcontext) -> list[Any]:
        found = []
        for seed in SEEDS:
            args, kwargs = copy.deepcopy(case.inputs(seed))
            with torch.inference_mode(), context():
                found.append(model(*args, **kwargs))
        return found

    expected = outputs(original)
    amp, failure = _peer(outputs, original, dtype)
    ours = outputs(converted)
    kind = f"{SHORT[dtype]} inference"
    if failure:
        row.autocast_failures[kind] = failure
    peers = [amp, outputs(_rounded(original, dtype))]
    row.compare(
        kind,
        relative_error(ours, expected),
        [relative_error(peer, expected) for peer in peers],
    )
    wanted, got = _dtypes(expected), _dtypes(ours)
    row.expect(got == wanted, f"{kind} gives {got}, in fp32 {wanted}")
    if dtype is BF16 and not failure:
        row.casts_inference = (
            _casts(partial(outputs, converted), converted),
            _casts(partial(outputs, original, _autocast(dtype)), original),
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
    original = case.model()
    settled = _settled(case, original)
    row.loss_scale = settled.scale

    def steps(
        model: nn.Module, context: Any = nullcontext, scale: float = 1
    ) -> list[Step]:
        return [_scaled_step(case, model, seed, context, scale) for seed in SEEDS]

    references = steps(copy.deepcopy(original))
    ours = steps(settled.model)
    amp, failure = _peer(partial(_finite, steps, settled.scale), original, FP16)
    rounded = steps(_rounded(original, FP16))
    if failure:
        row.autocast_failures["fp16"] = failure
    errors, *peers = (
        output_and_grad_errors(s, references) for s in (ours, amp, rounded)
    )
    for i, kind in enumerate(("output", "grad")):
        row.compare(f"fp16 {kind}", errors[i], [peer[i] for peer in peers])
    found = [g for step in ours for g in step.grads.values()]
    row.expect(all(bool(g.isfinite().all()) for g in found), "fp16 gradients overflow")
    kinds = {g.dtype for g in found}
    row.expect(kinds == {torch.float32}, f"fp16 gradients are {kinds}")


class _Settled(NamedTuple):
    """A model whose loss scale is in force as long as its optimizer lives."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scale: float


def _settled(case: ModelCase, original: nn.Module) -> _Settled:
    """The converted model once a round of steps skips none; no step moves it."""
    import autoamp

    start = copy.deepcopy(original.state_dict())
    model = convert(copy.deepcopy(original), FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(MOST_ROUNDS):
        skipped = [_step_is_skipped(case, model, optimizer, seed) for seed in SEEDS]
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
    steps: Callable[..., list[Step]], scale: float, model: nn.Module, context: Any
) -> list[Step]:
    """Autocast's steps at the largest loss scale at which it stays finite."""
    while True:
        found = steps(model, context, scale)
        finite = all(g.isfinite().all() for s in found for g in s.grads.values())
        if finite or scale <= 1:
            return found
        scale /= 2


def _scaled_step(
    case: ModelCase, model: nn.Module, seed: int, context: Any, scale: float
) -> Step:
    """A step whose loss is multiplied by `scale`, and its gradients divided."""
    step = training_step(
        model,
        lambda output: case.loss(output) * scale,
        case.inputs(seed),
        context=context,
        seed=seed,
    )
    grads = {name: grad.float() / scale for name, grad in step.grads.items()}
    return Step(step.output, grads, step.buffers, step.loss / scale)
