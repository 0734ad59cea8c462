"""Cleans a rewritten graph up, without adding or moving a cast."""

from __future__ import annotations

import torch
from torch import fx

from autoamp import compat
from autoamp.ops import drop_dead, is_dead
from autoamp.rewrite.copied import copied


def clean_up(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` without the nodes that have no effect.

    A node is left out if nothing reads it and it neither writes nor draws random
    numbers.  A grad-mode switch is left out if it changes nothing or if another switch
    follows it directly.  Where every node has an effect, `gm` itself is returned.
    """
    gm.graph.lint()
    if not any(map(is_dead, gm.graph.nodes)) and not _idle_grad_switches(gm.graph):
        return gm
    gm, _ = copied(gm)
    drop_dead(gm.graph)
    for switch in _idle_grad_switches(gm.graph):
        gm.graph.erase_node(switch)
    return gm


def _idle_grad_switches(graph: fx.Graph) -> list[fx.Node]:
    """Switches that change nothing or that another switch follows directly.

    Tracing leaves pairs of switches behind, off and on again, with no node in between.
    """
    idle = []
    current = torch.is_grad_enabled()
    for node in graph.find_nodes(op="call_function", target=compat.SET_GRAD):
        wanted = bool(node.args[0])
        if wanted == current or node.next.target is compat.SET_GRAD:
            idle.append(node)
        else:
            current = wanted
    return idle
