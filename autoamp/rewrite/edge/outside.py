"""Finds the tensors outside a graph's edge: results, and the tensors they are views of.

Outside tensors have the caller's gradient, unscaled.  A result may be a view.  The
caller may write to the view, and through it to the tensor that the result is a view of;
autograd then makes the view's history anew, out of that tensor's history.  So gradients
enter at the tensor that is no view, and all tensors from there to the result are
outside.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from autoamp.errors import CaptureError
from autoamp.rewrite.edge.gradient_flow import GraphFlow

Outside = dict[fx.Node, list[fx.Node]]
"""Each tensor outside, with the tensors outside that it is a view of."""


def find_outside(flow: GraphFlow, written: Sequence[fx.Node]) -> Outside:
    """The tensors beyond the edge of a graph; gradients enter at each that is no view.

    Args:
        written: the inputs that the graph writes results to.
    """
    found: Outside = {node: [] for node in written}
    _reach(flow, found, flow.results())
    _reach(flow, found, _older_views(flow, found))
    return found


def is_written(flow: GraphFlow, node: fx.Node) -> bool:
    """Whether the graph writes to the memory of a value."""
    return flow.storage(node) in flow.facts.mutated


def check_memory(flow: GraphFlow, written: Sequence[fx.Node]) -> None:
    """Checks that no input that is written to shares memory with another one.

    Raises:
        CaptureError: two such inputs share memory, and gradients flow into both.
    """
    storages = {flow.storage(node) for node in written}
    flowing = [node for node in flow.given if flow.differentiable(node, node)]
    every = dict.fromkeys([*written, *flowing])
    sharing = [node for node in every if flow.storage(node) in storages]
    if len(storages) < len(sharing):
        raise CaptureError(
            "the graph writes in place to an input that shares memory with another "
            "one, and both carry gradients; clone one of them before the call"
        )


def _older_views(flow: GraphFlow, outside: Outside) -> list[fx.Node]:
    """Views made before the last write to their tensor and read after it.

    The write makes the history of such views anew as well.
    """
    written = {flow.storage(node) for node in outside if is_written(flow, node)}
    return [
        node
        for node, names in flow.names.items()
        if flow.storage(node) in written
        and any(
            flow.at(user) > flow.last_write(node) > flow.at(node)
            for name in names
            for user in name.users
            if user.op != "output" and flow.carries(user)
        )
    ]


def _reach(flow: GraphFlow, outside: Outside, pending: list[fx.Node]) -> None:
    """Adds the `pending` tensors to `outside`, and all tensors they are views of."""
    while pending:
        node = flow.tensor(pending.pop())
        # The gradient of an input that is handed back does not enter the graph.
        if node in outside or node in flow.given:
            continue
        maker = node
        if node.target is operator.getitem:
            (maker,) = node.all_input_nodes
        sources = flow.viewed(maker, node)
        outside[node] = sources
        if sources and maker is not node:  # the maker's other views are outside too
            outside[node] = [maker]
            outside[maker] = [*outside.get(maker, []), *sources]
            pending += maker.users
        pending += sources
