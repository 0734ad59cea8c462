"""Which region of a graph a pass leaves alone after a failed check.

One bad node must not take the whole graph back to fp32.  The nodes that an error names
are left alone and the pass runs again; if an error comes back, a wider region is left
alone, at most `RETRIES` times in all.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autoamp.errors import AutoampError
from autoamp.messages import printable_line

RETRIES = 4
"""How often a pass is run again at most."""

REACHES = (0, 2, 4, 8)
"""Sizes of a region, in steps from the named nodes; the least that adds nodes is taken.

The largest sizes are there because a low kernel may lay out its result differently, and
the failure shows only some views further down, at the first view that cannot be made.
"""

REPORT = "kept in fp32 after a failed check: please report"


class LeaveOut(Exception):  # noqa: N818 - no error: an instruction
    """A pass of the list is to be left out; the passes from there on run again."""

    def __init__(self, name: str, why: str) -> None:
        """Args: `name` of the pass, and the reason."""
        super().__init__(f"{name}: {why}")
        self.name = name


def wider(error: Exception, graph: fx.Graph, known: Collection[str]) -> list[str]:
    """The nodes of the smallest region round an error that adds any to `known`.

    Returns:
        Names of calls of `graph`, in graph order; empty if no region adds any.
    """
    named = error.nodes if isinstance(error, AutoampError) else ()
    for reach in REACHES:
        fresh = [n for n in _region(named, graph, reach) if n not in known]
        if fresh:
            return fresh
    return []


def kept_for(error: Exception) -> str:
    """The reason, for the report, why nodes stay fp32 after `error`."""
    return printable_line(f"{REPORT}: {error}")


def _region(named: Collection[str], graph: fx.Graph, reach: int) -> list[str]:
    """The calls within `reach` steps of the named nodes, in graph order."""
    start = {n for n in graph.nodes if n.name in named}
    found = {n for n in start if n.op == "call_function"}
    found = found or {m for n in start for m in n.users if m.op == "call_function"}
    for _ in range(reach):
        beside = {m for n in found for m in (*n.all_input_nodes, *n.users)}
        found |= {n for n in beside if n.op == "call_function"}
    return [n.name for n in graph.nodes if n in found]
