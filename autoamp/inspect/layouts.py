"""A line of the report on values that have their channels last."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from autoamp.graph_functions import laid_out
from autoamp.inspect.text import counted
from autoamp.rewrite.layouts import LAST


def layouts_text(graphs: Iterable[fx.GraphModule]) -> list[str]:
    """How many ops have their channels last; no line where no op has."""
    nodes = [node for gm in graphs for node in gm.graph.nodes]
    last = sum(LAST in n.meta and n.op == "call_function" for n in nodes)
    if not last:
        return []
    changes = sum(node.target is laid_out for node in nodes)
    changed = counted(changes, "change")
    run = "runs" if last == 1 else "run"
    return [f"{counted(last, 'op')} {run} with channels last ({changed} of layout)."]
