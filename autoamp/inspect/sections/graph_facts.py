"""Sentences on the casts, the kernels, the layouts and the captured graphs.

`print(report)` and the page show them.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoamp.inspect.document import Document
from autoamp.inspect.layouts import layouts_text
from autoamp.inspect.sections.cast_counts import counts_text
from autoamp.inspect.sections.compiled_casts import compiled_text
from autoamp.inspect.text import counted, kernels_text


def graph_facts(report: Document, low: str) -> Iterator[str]:
    """The sentences.

    Args:
        low: the short name of the compute dtype.
    """
    yield counts_text(report.cast_counts, low)
    yield from compiled_text(report.compiled_casts)
    yield from kernels_text(report.ops)
    yield from layouts_text(report.graphs)
    graphs = f"{counted(len(report.graphs), 'graph')} captured"
    if report.explained_for:
        yield f"{graphs}; nothing was converted: convert() would do this."
    else:
        yield f"{graphs}; rewritten graphs ran {counted(report.runs, 'time')}."
