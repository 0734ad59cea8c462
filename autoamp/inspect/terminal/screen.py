"""The parts of a report in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from autoamp.inspect.document import Document
from autoamp.inspect.sections.graph_facts import graph_facts
from autoamp.inspect.terminal import details, state, summary
from autoamp.inspect.text import not_captured


def summary_of(report: Document, advice: Sequence[str]) -> Iterator[RenderableType]:
    """The summary: four questions and their answers."""
    title = f"autoamp report: {report.label}"
    if report.explained_for:
        title += f", explained for {report.explained_for}"
    low = report.compute_dtype
    if low is None:
        yield Text(title, "bold")
        if not report.skipped:
            yield Text("no graph captured yet: call the model once, then ask again")
            return
        yield from summary.not_converted(report.skipped, [*_calls(report)])
    else:
        yield Text(f"{title}, compute dtype {low}", "bold")
        facts = [*graph_facts(report, low), *_calls(report)]
        yield from summary.runs_low(report.headline, low, facts)
        yield from summary.gains(report.headline, low)
        if report.frontier is not None:
            yield from summary.budget(report.frontier)
        left = not_captured(report.skipped)
        yield from summary.stayed(report.headline, report.stayed, left)
    yield from summary.what_next(advice)


def _calls(report: Document) -> Iterator[str]:
    """Sentences on what has happened in calls and steps so far."""
    if report.explained_for:
        return
    if report.coverage is not None and report.coverage.calls:
        yield state.covered(report.coverage)
    if report.loss_scale is not None:
        yield state.loss_scaling(report.loss_scale)


def details_of(report: Document) -> Iterator[RenderableType]:
    """The lists behind the summary, which the full report ends with."""
    if report.prediction is not None and report.ops:
        yield from details.prediction(report.prediction, report.headline)
        yield details.because(report.because)
    yield from details.largest_casts(report.casts)
    yield from details.weights_out_of_range(report.weights)
    yield from details.odd_sizes(report.misfits)
    if report.explained_for:
        return
    if report.unwatched:
        yield state.copied_anew(report.unwatched)
    for line in _calls(report):
        yield Text(f"\n{line}")
    if report.loss_scale is not None:
        yield from map(Text, state.skips(report.loss_scale))
