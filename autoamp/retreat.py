"""A failed check costs a region: what it names stays fp32, and the rest is converted.

One bad node must not take the whole graph back to fp32.  The nodes that an error is
about are pinned and the placement is solved again; an error that comes back takes a
wider region with it, a few times at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import fx

from autoamp.errors import AutoampError
from autoamp.plain import plain_line

_T = TypeVar("_T")

RETRIES = 4
"""How often the passes are run again."""

REACHES = (0, 2, 4, 8)
"""How many steps from the named nodes a region goes: the least that keeps more nodes.

A layout that only a low kernel gives shows some views further down, where the first
one that cannot be computed fails: hence the last ones."""

REPORT = "kept in fp32 after a failed check: please report"


def retreating(
    attempt: Callable[[Mapping[str, str]], _T], graph: fx.Graph, *, strict: bool
) -> _T:
    """What `attempt` gives, told which nodes of `graph` to keep fp32, and why each.

    Args:
        strict: raise what the first attempt raises.

    Raises:
        Exception: the last attempt's, where no region helps; the first's if `strict`.
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
    """The smallest region round what `error` names that was not kept before."""
    named = error.nodes if isinstance(error, AutoampError) else ()
    for reach in REACHES:
        fresh = [n for n in _region(named, graph, reach) if n not in kept]
        if fresh:
            return dict.fromkeys(fresh, kept_for(error))
    return {}


def kept_for(error: Exception) -> str:
    """What the report says of nodes that stay fp32 for `error`."""
    return plain_line(f"{REPORT}: {error}")


def _region(named: tuple[str, ...], graph: fx.Graph, reach: int) -> list[str]:
    """The calls within `reach` steps of the named nodes, in graph order."""
    start = {n for n in graph.nodes if n.name in named}
    found = {n for n in start if n.op == "call_function"}
    found = found or {m for n in start for m in n.users if m.op == "call_function"}
    for _ in range(reach):
        beside = {m for n in found for m in (*n.all_input_nodes, *n.users)}
        found |= {n for n in beside if n.op == "call_function"}
    return [n.name for n in graph.nodes if n in found]
