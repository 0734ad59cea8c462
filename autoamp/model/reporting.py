"""Makes the report of a conversion from its record."""

from __future__ import annotations

from collections import Counter

from torch import nn

from autoamp.capture.record import Record
from autoamp.dtypes import NARROWEST
from autoamp.inspect.figures import (
    Coverage,
    LossScaleReport,
    Range,
    coverage_of,
    ranges_of,
)
from autoamp.inspect.report import Report
from autoamp.model.conversion import conversion_of
from autoamp.printable import class_name
from autoamp.training.model_scaling import ModelScaling


def report_of(
    record: Record, model: nn.Module | None = None, explained_for: str = ""
) -> Report:
    """The report so far on the conversion of a model or of a compiled function.

    Args:
        model: the model, whose weights are compared with the range of fp16.
        explained_for: the device that graphs were rewritten for without being run.
    """
    captured = [g for g in record.graphs if g.rewritten is not None]
    return Report(
        label=record.label,
        rewritten=[g.rewritten for g in captured if g.rewritten is not None],
        graphs=[g.gm for g in captured],
        skipped=_skipped(record),
        runs=record.runs,
        unwatched=max((g.copies.unwatched for g in captured if g.copies), default=0),
        loss_scale=loss_scale_of(record.scaling),
        coverage=_coverage(record),
        ranges=_ranges(record, model),
        explained_for=explained_for,
    )


def report_on(model: nn.Module) -> Report | None:
    """The report on a model; None if `convert` was never called on it."""
    state = conversion_of(model)
    if state is None:
        return None
    if state.engine is not None:
        return report_of(state.engine.record, model)
    skipped = [(s.what, s.why) for s in state.skipped]
    return Report(class_name(model), (), (), skipped)


def _ranges(record: Record, model: nn.Module | None) -> dict[str, Range]:
    if model is None or record.low != NARROWEST:
        return {}
    return ranges_of(dict(model.named_parameters(remove_duplicate=False)))


def _skipped(record: Record) -> list[tuple[str, str]]:
    return [(s.what, s.why) for s in record.skipped]


def _coverage(record: Record) -> Coverage:
    done = [
        (g.rewritten, g.sizes or Counter({(): g.runs}))
        for g in record.graphs
        if g.rewritten is not None
    ]
    calls = record.calls, record.aside, record.in_part
    return coverage_of(calls, done, _skipped(record))


def loss_scale_of(scaling: ModelScaling) -> LossScaleReport | None:
    """The state of a model's loss scaling, for the report.

    None for a model without loss scaling, unless a step of it has been skipped.
    """
    if not scaling.enabled and not scaling.domain.loss_scale.skipped_steps:
        return None
    scale = scaling.domain.loss_scale
    return LossScaleReport(
        kind=class_name(scale),
        scale=scale.scale,
        growth_tracker=scale.growth_tracker,
        skipped_steps=scale.skipped_steps,
        skips=tuple(scaling.ledger.skips),
        foreign=bool(scaling.ledger.foreign),
    )
