"""Makes the report of a conversion from its record."""

from __future__ import annotations

from collections import Counter

from torch import nn

from autoamp import compat
from autoamp.dtypes import NARROWEST
from autoamp.messages import class_name
from autoamp.reports.figures import LossScaleReport, Range, coverage_of, ranges_of
from autoamp.reports.report import Report
from autoamp.runtime.conversion import conversion_of
from autoamp.runtime.conversion_record import Record
from autoamp.training import half_models
from autoamp.training.meter import shares_of
from autoamp.training.model_scaling import ModelScaling

_PLAIN = ("the model", "autoamp.convert was not called on it")
"""The reason in the report of a model whose updates alone are measured."""


def report_of(
    record: Record, model: nn.Module | None = None, explained_for: str = ""
) -> Report:
    """The report so far on the conversion of a model or of a compiled function.

    Args:
        model: the model, whose weights are compared with the range of fp16.
        explained_for: the device that graphs were rewritten for without being run.
    """
    captured = [(g, g.rewritten) for g in record.graphs if g.rewritten is not None]
    skipped = [(s.what, s.why) for s in record.skipped]
    calls = record.calls, record.aside, record.in_part
    runs = [(done, g.sizes or Counter({(): g.runs})) for g, done in captured]
    ranges: dict[str, Range] = {}
    if model is not None and record.low == NARROWEST:
        ranges = ranges_of(dict(model.named_parameters(remove_duplicate=False)))
    return Report(
        label=record.label,
        rewritten=[done for _, done in captured],
        graphs=[g.gm for g, _ in captured],
        skipped=skipped,
        runs=record.runs,
        unwatched=max((g.copies.unwatched for g, _ in captured if g.copies), default=0),
        loss_scale=loss_scale_of(record.scaling),
        coverage=coverage_of(calls, runs, skipped),
        ranges=ranges,
        explained_for=explained_for,
        updates=() if model is None else shares_of(model),
    )


def report_on(model: nn.Module) -> Report | None:
    """The report on a model.

    None if `convert` was never called on it, and no updates of its weights were
    measured.
    """
    state, updates = conversion_of(model), shares_of(model)
    if state is None and not updates:
        return None
    if state is not None and state.engine is not None:
        return report_of(state.engine.record, model)
    skipped = [_PLAIN] if state is None else [(s.what, s.why) for s in state.skipped]
    guard = half_models.guards(compat.inside_wrappers(model))
    scale = None if guard is None else loss_scale_of(guard)
    return Report(class_name(model), (), (), skipped, loss_scale=scale, updates=updates)


def loss_scale_of(scaling: ModelScaling) -> LossScaleReport | None:
    """The state of a model's loss scaling, for the report.

    None for a model without loss scaling, unless a step of it has been skipped.
    """
    if not scaling.enabled and not scaling.own_scale.skipped_steps:
        return None
    scale = scaling.own_scale
    return LossScaleReport(
        kind=class_name(scale),
        scale=scale.scale,
        growth_tracker=scale.growth_tracker,
        skipped_steps=scale.skipped_steps,
        skips=tuple(scaling.ledger.skips),
        foreign=bool(scaling.ledger.foreign),
    )
