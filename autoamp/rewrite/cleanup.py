"""Cleans a rewritten graph up, without adding or moving a cast."""

from __future__ import annotations

import torch
from torch import fx

from autoamp import compat
from autoamp.ops import drop_dead
from autoamp.rewrite.copied import copied


def clean_up(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` without the nodes that have no effect.

    A node is left out if nothing reads it and it neither writes nor draws random
    numbers.  A grad-mode switch is left out if it changes nothing or if another switch
    follows it directly.
    """
    gm.graph.lint()
    gm, _ = copied(gm)
    drop_dead(gm.graph)
    _drop_idle_grad_switches(gm.graph)
    return gm


def _drop_idle_grad_switches(graph: fx.Graph) -> None:
    """Drops switches that change nothing or that another switch follows directly.

    Tracing leaves pairs of switches behind, off and on again, with no node in between.
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
