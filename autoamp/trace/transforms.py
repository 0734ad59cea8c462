"""Each `vmap`, `grad` or `jvp` inside a graph becomes one call of a sub-graph.

Dynamo writes a transform of torch.func inside a model as calls that enter it, the ops
on wrapped tensors, and calls that leave it.  A trace above autograd sees the wrapped
tensors, knows none of them, and would keep their contents as constants.

    entered = vmap_enter(5)                     out = wrap(body, x, w)
    row = add_batch_dim(x)               ->     y = out[0]
    product = row * w
    y = remove_batch_dim(product)
    left = vmap_exit()
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from autoamp import compat

_OUTSIDE = ("placeholder", "get_attr", "output")


def fold_transforms(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm` with each outermost transform as one call; `gm` itself if it has none."""
    spans = _spans(gm.graph)
    if not spans:
        return gm
    folded = fx.GraphModule(gm, gm.graph)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    inside = {node: span for span in spans for node in span}
    for node in gm.graph.nodes:
        span = inside.get(node)
        if span is None:
            values[node] = graph.node_copy(node, values.__getitem__)
        elif node is span[-1]:
            name = f"autoamp_transformed_{spans.index(span)}"
            setattr(folded, name, _call(gm, span, name, graph, values))
    folded.graph = graph
    return folded


def _spans(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each outermost transform, from its entry to its exit."""
    spans: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        if node.target in compat.TRANSFORM_ENTRIES:
            if depth == 0:
                spans.append([])
            depth += 1
        if depth and node.op not in _OUTSIDE:
            spans[-1].append(node)
        if node.target in compat.TRANSFORM_EXITS:
            depth -= 1
    return spans


def _call(
    gm: fx.GraphModule,
    span: list[fx.Node],
    name: str,
    graph: fx.Graph,
    values: dict[fx.Node, fx.Node],
) -> fx.GraphModule:
    """The sub-graph of `span`; `graph` gets the call and `values` its results."""
    members = frozenset(span)
    operands = _ordered(i for n in span for i in n.all_input_nodes if i not in members)
    results = [n for n in span if not members.issuperset(n.users)]
    body = fx.Graph()
    inner = {node: body.placeholder(node.name) for node in operands}
    for node in span:
        inner[node] = body.node_copy(node, inner.__getitem__)
    body.output(tuple(inner[node] for node in results))

    target = graph.get_attr(name)
    call = graph.call_function(compat.WRAP, (target, *(values[o] for o in operands)))
    call.meta = {k: v for k, v in span[0].meta.items() if k != "example_value"}
    for index, node in enumerate(results):
        values[node] = graph.call_function(operator.getitem, (call, index))
        values[node].meta = dict(node.meta)
    return fx.GraphModule(gm, body)


def _ordered(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Each node once, in the order of first appearance."""
    return list(dict.fromkeys(nodes))
