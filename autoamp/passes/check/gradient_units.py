"""Checks by units that every gradient is scaled once on its way in and unscaled once.

Inside a graph whose loss is scaled a gradient is either true or scaled, as a length is
in metres or in feet.  Backwards are linear, so the gradient of an op's result and those
of its operands are in the same unit; the functions of the edge change the unit, each in
one way; the gradients of the graph's results and of its inputs are true.  The
units of a graph either agree, or some gradient is scaled twice or never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx
from torch import fx

from autoamp.errors import VerificationError
from autoamp.passes.check.flowing import flowing_in
from autoamp.passes.check.standin import named, storages_of, where
from autoamp.passes.functions import (
    FOR_COMPILERS,
    low_uses,
    low_weight,
    low_weight_unscaled,
    scale_grad,
    scaled_result,
    traced_scale_grad_,
    traced_scale_grad_apart,
    unscale_grad,
    unscale_grad_,
    unscale_half,
)
from autoamp.passes.see.nodes import written_values

TRUE, SCALED = "true", "scaled"

_WAYS: dict[Callable[..., Any], tuple[str, str]] = {
    scale_grad: (SCALED, TRUE),
    scaled_result: (SCALED, TRUE),
    traced_scale_grad_: (SCALED, TRUE),
    traced_scale_grad_apart: (SCALED, TRUE),
    unscale_grad: (TRUE, SCALED),
    unscale_grad_: (TRUE, SCALED),
    unscale_half: (TRUE, SCALED),
    low_weight_unscaled: (TRUE, SCALED),
}
_WAYS |= {traced: _WAYS[plain] for plain, traced in FOR_COMPILERS.items()}
"""Each function of the edge: the unit of its operand's gradient, of its result's."""

_FIRST_ALONE = frozenset({*_WAYS, low_weight, low_uses})
"""Calls whose gradient goes to their first operand alone."""


_READS: dict[Callable[..., Any], tuple[int, ...]] = {
    scale_grad: (0,),
    scaled_result: (0,),
    unscale_grad: (1, 2),
    unscale_grad_: (1, 2),
    unscale_half: (1, 2),
    low_weight_unscaled: (1, 2),
}
"""Each function of the edge: which of a device's three inputs it reads last."""


def check_scales(gm: fx.GraphModule, extra: Sequence[str]) -> None:
    """Raises where a function of the edge reads another input than it must.

    Args:
        extra: names of the inputs for loss scaling: for each device the loss scale, its
            inverse and the flag for overflows.

    Raises:
        VerificationError: the message names the function and the inputs.
    """
    for node in gm.graph.nodes:
        wanted = _READS.get(node.target)
        if wanted is None:
            continue
        device = node.all_input_nodes[0].meta["val"].device
        devices = [
            at
            for at in range(0, len(extra), 3)
            if gm.graph.find_nodes(op="placeholder", target=extra[at])[0]
            .meta["val"]
            .device
            == device
        ]
        names = [n.name for n in node.args[-len(wanted) :]]
        if [[extra[at + w] for w in wanted] for at in devices] != [names]:
            raise VerificationError(
                f"{where(node)} reads {', '.join(names)} for the scale of {device}",
                nodes=named(node),
            )


def check_units(gm: fx.GraphModule) -> None:
    """Raises where a gradient of a scaled graph is in another unit than it must be.

    Values that the graph writes to are left out: a write gives a value a new history,
    and the value after the write is another one under the same memory.

    Raises:
        VerificationError: two paths of gradients meet in different units.
    """
    nodes = list(gm.graph.nodes)
    if not any(node.target in _WAYS for node in nodes):
        return
    related = nx.Graph()
    related.add_nodes_from((TRUE, SCALED))
    # What shares memory with something that the graph writes to is left out.
    written = [value for node in nodes for value in written_values(node)]
    in_place = (unscale_grad_, traced_scale_grad_)
    written += [n.all_input_nodes[0] for n in nodes if n.target in in_place]
    storages = storages_of(written)
    counted = {
        node
        for node in flowing_in(gm.graph)
        if storages.isdisjoint(storages_of([node]))
    }
    # `scale_grad` gives the value itself, whose maker's backward begins with the scale:
    # what readers give to the value, by either name, is true.
    entering = {node.args[0] for node in nodes if node.target is scale_grad}
    for node in nodes:
        if node.op == "output":
            read = [n for n in node.all_input_nodes if n in counted]
            related.add_edges_from((TRUE, value) for value in read)
        if node not in counted:
            continue
        # This gradient goes to the caller: clipping, logs and optimizers take it as it
        # is.
        if node.op == "placeholder":
            related.add_edge(TRUE, node)
            continue
        of_operand, of_result = _WAYS.get(node.target, (node, node))
        related.add_edge(of_result, node)
        operands = node.all_input_nodes[: 1 if node.target in _FIRST_ALONE else None]
        for operand in (n for n in operands if n in counted):
            given: Any = operand
            if operand in entering and node.target is not scale_grad:
                given = ("read", operand)
                related.add_edge(TRUE, given)
            related.add_edge(of_operand, given)
    # Joined are gradients that have to be in one unit: a path joins the two units
    # themselves.
    if nx.has_path(related, TRUE, SCALED):
        _, *path, _ = nx.shortest_path(related, TRUE, SCALED)
        values = [each if isinstance(each, fx.Node) else each[1] for each in path]
        first, last = values[0], values[-1]
        raise VerificationError(
            f"the gradient of {first.name} would be both true and scaled, at "
            f"{where(last)}",
            nodes=(*named(first), *named(last)),
        )
