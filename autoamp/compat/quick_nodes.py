"""Adds nodes to graphs without torch's search of their arguments.

`Graph.create_node` looks at every leaf of the arguments, to warn of symbolic numbers
that are no nodes (torch 2.13), and that takes more time than all else it does.  A node
made without arguments is not searched, and may be given its arguments afterwards.
"""

from __future__ import annotations

from typing import Any

from torch import fx


def quick_node(  # noqa: PLR0917
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str | None = None,
) -> fx.Node:
    """`graph.create_node(op, target, args, kwargs, name)`, without the search."""
    node = graph.create_node(op, target, (), {}, name)
    if args:
        node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


def quick_copy(
    graph: fx.Graph, into: fx.Graph, values: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Copies a graph with its output into the empty graph `into`; gives the output.

    Args:
        values: gets the copy of each node but the output.
    """
    result: Any = None
    for node in graph.nodes:
        if node.op == "output":
            result = fx.map_arg(node.args[0], values.__getitem__)
            break
        args: Any = fx.map_arg(node.args, values.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
        new = quick_node(into, node.op, node.target, args, kwargs, node.name)
        if node.type is not None:
            new.type = node.type
        new.meta.update(node.meta)
        values[node] = new
    output: fx.Node = into.output(result)
    return output
