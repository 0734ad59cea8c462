"""Copies of graphs, so that no pass changes the graph that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.passes.ops import drop_dead, is_dead


def copied(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy of `gm`, whose nodes have the same names, and each node's copy.

    Parameters, buffers and sub-graphs are shared.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = compat.quick_copy(gm.graph, graph, values)
    # `quick_copy` notes no copy of the output, which callers look up as well.
    output = gm.graph.output_node()
    result.meta = dict(output.meta)
    values[output] = result
    copy = compat.graph_module(gm, graph)
    copy.meta.update(gm.meta)
    return copy, values


def edited(
    gm: fx.GraphModule,
    edit: Callable[[fx.Graph], None],
    *,
    finds: Callable[[fx.Graph], object],
) -> fx.GraphModule:
    """`gm` with `edit` applied to copies of its graph and of the graphs inside.

    Args:
        edit: changes a graph in place.
        finds: whether there is something to change in a graph; a graph in which there
            is nothing is not copied.

    Returns:
        `gm` itself where nothing is changed.
    """
    bodies = {
        name: new
        for name, child in gm.named_children()
        if isinstance(child, fx.GraphModule)
        and (new := edited(child, edit, finds=finds)) is not child
    }
    # Most passes find nothing in most graphs: a copy costs time at the first call.
    changes = bool(finds(gm.graph))
    if not bodies and not changes:
        return gm
    copy, _ = copied(gm)
    if changes:
        edit(copy.graph)
    for name, body in bodies.items():
        setattr(copy, name, body)
    return copy


def with_targets(
    gm: fx.GraphModule, choose: Callable[[fx.Node], Any]
) -> fx.GraphModule:
    """`gm` with other functions called; `gm` itself where all stay the same.

    Args:
        choose: the function to call at a node; the node's own target leaves it.
    """

    def finds(graph: fx.Graph) -> bool:
        return any(choose(n) is not n.target for n in _calls(graph))

    def edit(graph: fx.Graph) -> None:
        for node in _calls(graph):
            node.target = choose(node)

    return edited(gm, edit, finds=finds)


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


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
        # A capture may begin under `no_grad`, so that the first switch need not change
        # anything.
        wanted = bool(node.args[0])
        if wanted == current or node.next.target is compat.SET_GRAD:
            idle.append(node)
        else:
            current = wanted
    return idle
