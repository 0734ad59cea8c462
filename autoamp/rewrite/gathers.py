"""Has a DTensor gathered in the low dtype where all its readers read it low.

Before, with `whole` a DTensor of which each rank held a part:

    whole = redistribute(part);  low = _to_copy(whole, dtype=bf16);  y = linear(low, w)

after, with half the bytes sent, and the same numbers:

    low = gathered_low(part, bf16, 1);  y = linear(low, w)
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from autoamp.graph_functions.casts import low_uses
from autoamp.graph_functions.gathers import gathered_low
from autoamp.graph_functions.meshes import IN_WHOLE
from autoamp.rewrite.copied import edited
from autoamp.trace.meshes import MESH_CALL

_CAST = torch.ops.aten._to_copy.default


def with_low_gathers(
    gm: fx.GraphModule, low: torch.dtype, left: Collection[str] = ()
) -> fx.GraphModule:
    """`gm` with casts to `low` before gathers; `gm` itself where there are none.

    Args:
        left: names of nodes that stay as they are.
    """

    def finds(graph: fx.Graph) -> list[fx.Node]:
        gathers = graph.find_nodes(op="call_function", target=IN_WHOLE["redistribute"])
        return [n for n in gathers if n.name not in left and _is_read_low(n, low)]

    def edit(graph: fx.Graph) -> None:
        for node in finds(graph):
            _swap(graph, node, low)

    return edited(gm, edit, finds=finds)


def _is_read_low(node: fx.Node, low: torch.dtype) -> bool:
    """Whether one cast to the low dtype, and its uses, are all that reads a gather."""
    call = node.meta.get(MESH_CALL)
    if call is None or not call.gathers or not node.meta["val"].is_floating_point():
        return False
    casts, uses = _readers(node)
    if len(casts) != 1 or len(casts) + len(uses) != len(node.users):
        return False
    (cast,) = casts
    alone = not uses or (len(uses) == 1 and set(cast.users) == set(uses))
    return alone and cast.kwargs == {"dtype": low} and len(cast.args) == 1


def _readers(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The casts of a value, and the calls that give uses of one of the casts."""
    casts = [n for n in node.users if n.target is _CAST]
    uses = [n for n in node.users if n.target is low_uses and n.args[0] is node]
    return casts, uses


def _swap(graph: fx.Graph, node: fx.Node, low: torch.dtype) -> None:
    (cast,), uses = _readers(node)
    count = int(uses[0].args[2]) if uses else 1  # type: ignore[arg-type]
    last = uses[0] if uses else cast
    with graph.inserting_before(last):
        new = graph.call_function(gathered_low, (node.args[0], low, count))
    new.meta = {**last.meta, MESH_CALL: node.meta[MESH_CALL]}
    last.replace_all_uses_with(new)
    for gone in (*uses, cast, node):
        graph.erase_node(gone)
    new.name = last.name
