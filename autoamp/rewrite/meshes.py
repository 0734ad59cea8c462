"""Puts torch's calls on DTensors back, in the place of the ops that stood for them.

The graph that the passes have worked on takes whole tensors.  After this pass it takes
DTensors, and runs on each rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from autoamp.graph_functions.gathers import gather_low, gathered_low
from autoamp.graph_functions.meshes import IN_WHOLE, MESH_CALLS
from autoamp.rewrite.copied import edited
from autoamp.trace.meshes import MESH_CALL, Input, MeshCall

_WITHOUT_DATA = frozenset(IN_WHOLE.values())
_STAND_INS = frozenset({*_WITHOUT_DATA, gathered_low})


def with_mesh_calls(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm` with torch's calls; `gm` itself where it computes on no DTensors."""
    return edited(gm, _edit, finds=_found)


def crossed(node: fx.Node, value: Any, inputs: Sequence[Any]) -> Any:
    """What a stand-in's call gives on DTensors, in a graph that still has stand-ins.

    Args:
        value: the value that the node reads.
        inputs: the values of the graph's inputs.
    """
    call: MeshCall = node.meta[MESH_CALL]
    args, kwargs = _resolved(call, inputs)
    return MESH_CALLS[call.name](value, *args, **kwargs)


def stands_in(node: fx.Node) -> bool:
    """Whether a node stands for a call on DTensors, and computes nothing itself."""
    return node.target in _WITHOUT_DATA and MESH_CALL in node.meta


def _resolved(call: MeshCall, inputs: Sequence[Any]) -> Any:
    """The arguments of a call behind the first."""

    def resolved(given: Any) -> Any:
        return inputs[given.position] if isinstance(given, Input) else given

    return fx.node.map_aggregate((call.args, call.kwargs), resolved)


def _found(graph: fx.Graph) -> list[fx.Node]:
    """The ops that stand for calls; aliases and casts of their results are none."""
    return [n for n in graph.nodes if n.target in _STAND_INS and MESH_CALL in n.meta]


def _edit(graph: fx.Graph) -> None:
    inputs = graph.find_nodes(op="placeholder")
    for node in _found(graph):
        call: MeshCall = node.meta[MESH_CALL]
        args, kwargs = _resolved(call, inputs)
        low = node.target is gathered_low
        own = node.args if low else node.args[:1]
        node.target = gather_low if low else MESH_CALLS[call.name]
        node.args, node.kwargs = (*own, *args), kwargs
