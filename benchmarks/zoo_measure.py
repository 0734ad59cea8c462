"""One model of the zoo: trained and asked, in bf16 and in fp16, beside autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoamp.counted.ops import count_ops
from autoamp.counted.saved import saved_bytes

from .conformance import cost_shortfalls
from .errors import output_and_grad_errors, relative_error
from .metrics import SEEDS, ModelCase, compare_with_autocast
from .zoo_errors import (
    BF16,
    FP16,
    SHORT,
    Kind,
    Pair,
    Taken,
    asked,
    autocast,
    convert,
    gradients_of,
    outputs,
    pair,
    second_look,
    trained,
)


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
    import autoamp

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
            _casts(partial(counted, original, autocast(dtype)), original),
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
