"""Sentences on the casts, the kernels, the layouts and the captured graphs.

`print(report)` and the page show them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import fx

from autoamp.inspect.layouts import layouts_text
from autoamp.inspect.rows import OpRow
from autoamp.inspect.sections.cast_counts import CastCounts, counts_text
from autoamp.inspect.text import counted, kernels_text


class Counted(Protocol):
    """The parts of a `Report` that are counted."""

    @property
    def explained_for(self) -> str: ...
    @property
    def runs(self) -> int: ...
    @property
    def graphs(self) -> Sequence[fx.GraphModule]: ...
    @property
    def ops(self) -> Sequence[OpRow]: ...
    @property
    def cast_counts(self) -> CastCounts: ...


def graph_facts(report: Counted, low: str) -> Iterator[str]:
    """The sentences.

    Args:
        low: the short name of the compute dtype.
    """
    yield counts_text(report.cast_counts, low)
    yield from kernels_text(report.ops)
    yield from layouts_text(report.graphs)
    graphs = f"{counted(len(report.graphs), 'graph')} captured"
    if report.explained_for:
        yield f"{graphs}; nothing was converted: convert() would do this."
    else:
        yield f"{graphs}; rewritten graphs ran {counted(report.runs, 'time')}."
