"""Makes a call that crosses to or from the mesh once where the model makes it again.

`ColwiseParallel` hands the input of each of its linears to the mesh by itself: the
queries, keys and values of an attention do it three times with one value.  The backward
adds the gradient of each hand-over up over the ranks.  Handed over once, the gradients
of all readers are added first, and cross the wire as one.

Before:

    a = from_local(x);  y = linear(a, w);  b = from_local(x);  z = linear(b, v)

after:

    a = from_local(x);  y = linear(a, w);  z = linear(a, v)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import written_values
from autoamp.graph_functions.meshes import IN_WHOLE
from autoamp.rewrite.copied import edited
from autoamp.trace.meshes import MESH_CALL

_CROSSING = frozenset(IN_WHOLE.values())


def with_calls_once(gm: fx.GraphModule, left: Collection[str] = ()) -> fx.GraphModule:
    """`gm` without calls that cross again; `gm` itself where there are none.

    Args:
        left: names of nodes that stay as they are.
    """

    def edit(graph: fx.Graph) -> None:
        for again, first in _pairs(graph, left):
            again.replace_all_uses_with(first)
            graph.erase_node(again)

    return edited(gm, edit, finds=lambda graph: _pairs(graph, left))


def _pairs(graph: fx.Graph, left: Collection[str]) -> list[tuple[fx.Node, fx.Node]]:
    """Each call that is made again, with the first one, in graph order."""
    if not any(node.target in _CROSSING for node in graph.nodes):
        return []
    found: list[tuple[fx.Node, fx.Node]] = []
    stands: dict[fx.Node, fx.Node] = {}
    known: list[fx.Node] = []
    for node in graph.nodes:
        if node.target in compat.MODE_CHANGES or written_values(node):
            known.clear()
        if node.target not in _CROSSING or node.name in left:
            continue
        read = _source(node, stands)
        for first in known:
            same_value = _source(first, stands) is read
            if same_value and first.meta[MESH_CALL] == node.meta[MESH_CALL]:
                found.append((node, first))
                stands[node] = first
                break
        else:
            known.append(node)
    return found


def _source(node: fx.Node, stands: dict[fx.Node, fx.Node]) -> Any:
    value: Any = node.args[0]
    return stands.get(value, value)
