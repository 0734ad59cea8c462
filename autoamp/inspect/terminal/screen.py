"""The parts of a report in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from autoamp.inspect.document import Document
from autoamp.inspect.guarded import lines
from autoamp.inspect.sections.graph_facts import graph_facts
from autoamp.inspect.terminal import details, state, summary
from autoamp.inspect.text import not_captured


def summary_of(
    report: Document, advice: Callable[[], Sequence[str]]
) -> Iterator[RenderableType]:
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
        yield from _answers(report, low)
    yield from lines("the advice", lambda: summary.what_next(advice()))


def _answers(report: Document, low: str) -> Iterator[RenderableType]:
    yield from lines(
        "the answer to what runs low",
        lambda: summary.runs_low(
            report.headline, low, [*graph_facts(report, low), *_calls(report)]
        ),
    )
    yield from lines("the gain", lambda: summary.gains(report.headline, low))
    found = report.frontier
    if found is not None:
        yield from lines("the budget", lambda: summary.budget(found))
    yield from lines(
        "the list of what stayed in fp32",
        lambda: summary.stayed(
            report.headline, report.stayed, not_captured(report.skipped)
        ),
    )


def _calls(report: Document) -> Iterator[str]:
    """Sentences on what has happened in calls and steps so far."""
    if report.explained_for:
        return
    if report.coverage is not None and report.coverage.calls:
        yield state.covered(report.coverage)
    if report.loss_scale is not None:
        yield state.loss_scaling(report.loss_scale)


def _predicted(report: Document) -> Iterator[RenderableType]:
    if report.prediction is not None and report.ops:
        yield from details.prediction(report.prediction, report.headline)
        yield details.because(report.because)


def details_of(report: Document) -> Iterator[RenderableType]:
    """The lists behind the summary, which the full report ends with."""
    yield from lines("the prediction", lambda: _predicted(report))
    yield from lines("the list of casts", lambda: details.largest_casts(report.casts))
    yield from lines(
        "the list of weights", lambda: details.weights_out_of_range(report.weights)
    )
    yield from lines("the list of sizes", lambda: details.odd_sizes(report.misfits))
    if report.explained_for:
        return
    if report.unwatched:
        yield state.copied_anew(report.unwatched)
    for line in _calls(report):
        yield Text(f"\n{line}")
    if report.loss_scale is not None:
        yield from map(Text, state.skips(report.loss_scale))
