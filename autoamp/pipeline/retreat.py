"""Runs the passes again after a failed check, with a region of the graph kept fp32.

One bad node must not take the whole graph back to fp32.  The nodes that an error names
are pinned and the placement is solved again; if an error comes back, a wider region is
pinned, at most `RETRIES` times in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import fx

from autoamp.errors import AutoampError
from autoamp.printable import printable_line

_T = TypeVar("_T")

RETRIES = 4
"""How often the passes are run again at most."""

REACHES = (0, 2, 4, 8)
"""Sizes of a region, in steps from the named nodes; the least that adds nodes is taken.

The largest sizes are there because a low kernel may lay out its result differently, and
the failure shows only some views further down, at the first view that cannot be made.
"""

REPORT = "kept in fp32 after a failed check: please report"


def retreating(
    attempt: Callable[[Mapping[str, str]], _T], graph: fx.Graph, *, strict: bool
) -> _T:
    """The result of `attempt`; on failure it runs again with more nodes kept fp32.

    Args:
        attempt: runs the passes, given the nodes of `graph` to keep fp32, each to the
            reason.
        strict: whether to raise the error of the first attempt.

    Raises:
        Exception: the error of the last attempt, if no region helps, or of the first,
            if `strict`.
    """
    kept: dict[str, str] = {}
    for _ in range(0 if strict else RETRIES):
        try:
            return attempt(kept)
        except Exception as error:
            fresh = _wider(error, graph, kept)
            if not fresh:
                raise
            kept |= fresh
    return attempt(kept)


def _wider(
    error: Exception, graph: fx.Graph, kept: Mapping[str, str]
) -> dict[str, str]:
    """The new nodes, with reason, of the smallest region that adds any to `kept`."""
    named = error.nodes if isinstance(error, AutoampError) else ()
    for reach in REACHES:
        fresh = [n for n in _region(named, graph, reach) if n not in kept]
        if fresh:
            return dict.fromkeys(fresh, kept_for(error))
    return {}


def kept_for(error: Exception) -> str:
    """The reason, for the report, why nodes stay fp32 after `error`."""
    return printable_line(f"{REPORT}: {error}")


def _region(named: tuple[str, ...], graph: fx.Graph, reach: int) -> list[str]:
    """The calls within `reach` steps of the named nodes, in graph order."""
    start = {n for n in graph.nodes if n.name in named}
    found = {n for n in start if n.op == "call_function"}
    found = found or {m for n in start for m in n.users if m.op == "call_function"}
    for _ in range(reach):
        beside = {m for n in found for m in (*n.all_input_nodes, *n.users)}
        found |= {n for n in beside if n.op == "call_function"}
    return [n.name for n in graph.nodes if n in found]
