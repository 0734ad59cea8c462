"""Tidies a rewritten graph.  Never adds a cast, never moves one."""

from __future__ import annotations

import torch
from torch import fx

from autoamp import compat
from autoamp.ops import drop_dead


def clean_up(gm: fx.GraphModule) -> int:
    """Removes what does nothing from `gm`, in place; gives the number of nodes removed.

    Removed are nodes nobody reads that write nothing and draw no random numbers, and
    grad-mode switches with nothing between them.
    """
    before = len(gm.graph.nodes)
    drop_dead(gm.graph)
    _drop_idle_grad_switches(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return before - len(gm.graph.nodes)


def _drop_idle_grad_switches(graph: fx.Graph) -> None:
    """Drops switches that change nothing, or are switched again at once.

    Tracing leaves pairs behind: off and on again, with nothing in between.
    """
    current = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.target is not compat.SET_GRAD:
            continue
        wanted = bool(node.args[0])
        if wanted == current or node.next.target is compat.SET_GRAD:
            graph.erase_node(node)
        else:
            current = wanted
