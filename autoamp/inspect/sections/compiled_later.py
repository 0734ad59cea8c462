"""How far inductor is in the background, under `backend="auto"`, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoamp.inspect.rows import Section
from autoamp.inspect.text import counted
from autoamp.rewrite.compiled_later import COMPILED, COMPILING, EAGER


def later_text(sections: Sequence[Section]) -> Iterator[str]:
    """The sentences; none where no graph is to be compiled in the background."""
    states = {s.graph: s.background for s in sections if s.background}
    every = [*states.values()]
    for state, what in (
        (EAGER, "eager, and inductor compiles each in the background if it repeats"),
        (COMPILING, "eager, while inductor compiles in the background"),
        (COMPILED, "as code that inductor compiled in the background"),
    ):
        if state in every:
            found = every.count(state)
            yield f"{counted(found, 'graph')} {'runs' if found == 1 else 'run'} {what}."
    for graph, state in states.items():
        if state not in (EAGER, COMPILING, COMPILED):
            yield f"Graph {graph} stays eager: {state}."
