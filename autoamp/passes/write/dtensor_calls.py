"""The calls on DTensors: made once, gathered low, and put back in their places.

The graph that the passes work on takes whole tensors; ops stand for the calls that
cross to or from the mesh.  The graph that runs takes DTensors, and runs on each rank's
part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.passes.functions.casts import low_uses
from autoamp.passes.functions.dtensor_crossings import (
    IN_WHOLE,
    MESH_CALLS,
    gather_low,
    gathered_low,
)
from autoamp.passes.see.dtensors_as_whole import MESH_CALL, Input, MeshCall
from autoamp.passes.see.nodes import written_values
from autoamp.passes.write.copied import edited

_WITHOUT_DATA = frozenset(IN_WHOLE.values())
_STAND_INS = frozenset({*_WITHOUT_DATA, gathered_low})
_CAST = torch.ops.aten._to_copy.default


# -- handed to the mesh once -----------------------------------------------------------


def with_calls_once(gm: fx.GraphModule, left: Collection[str] = ()) -> fx.GraphModule:
    """`gm` without calls that cross again; `gm` itself where there are none.

    `ColwiseParallel` hands the input of each of its linears to the mesh by itself: the
    queries, keys and values of an attention do it three times with one value.  The
    backward adds the gradient of each hand-over up over the ranks.  Handed over once,
    the gradients of all readers are added first, and cross the wire as one.

    Before:

        a = from_local(x);  y = linear(a, w);  b = from_local(x);  z = linear(b, v)

    after:

        a = from_local(x);  y = linear(a, w);  z = linear(a, v)

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
    if not any(node.target in _WITHOUT_DATA for node in graph.nodes):
        return []
    found: list[tuple[fx.Node, fx.Node]] = []
    stands: dict[fx.Node, fx.Node] = {}
    known: list[fx.Node] = []
    for node in graph.nodes:
        if node.target in compat.MODE_CHANGES or written_values(node):
            # A write, or a change of grad mode, between two calls makes them two
            # values.
            known.clear()
        if node.target not in _WITHOUT_DATA or node.name in left:
            continue
        read = _handed_on(node, stands)
        for first in known:
            same_value = _handed_on(first, stands) is read
            if same_value and first.meta[MESH_CALL] == node.meta[MESH_CALL]:
                found.append((node, first))
                # A chain of calls that is made twice is then found to be the same at
                # every link.
                stands[node] = first
                break
        else:
            known.append(node)
    return found


def _handed_on(node: fx.Node, stands: dict[fx.Node, fx.Node]) -> Any:
    value: Any = node.args[0]
    return stands.get(value, value)


# -- gathered in the low dtype ---------------------------------------------------------


def with_low_gathers(
    gm: fx.GraphModule, low: torch.dtype, left: Collection[str] = ()
) -> fx.GraphModule:
    """`gm` with casts to `low` before gathers; `gm` itself where there are none.

    Before, with `whole` a DTensor of which each rank held a part:

        whole = redistribute(part)
        low = _to_copy(whole, dtype=bf16);  y = linear(low, w)

    after, with half the bytes sent, and the same numbers:

        low = gathered_low(part, bf16, 1);  y = linear(low, w)

    Args:
        left: names of nodes that stay as they are.
    """

    def finds(graph: fx.Graph) -> list[fx.Node]:
        gathers = graph.find_nodes(op="call_function", target=IN_WHOLE["redistribute"])
        return [n for n in gathers if n.name not in left and _is_read_low(n, low)]

    def edit(graph: fx.Graph) -> None:
        for node in finds(graph):
            (cast,), uses = _readers(node)
            count = int(uses[0].args[2]) if uses else 1  # type: ignore[arg-type]
            last = uses[0] if uses else cast
            with graph.inserting_before(last):
                gather = graph.call_function(gathered_low, (node.args[0], low, count))
            gather.meta = {**last.meta, MESH_CALL: node.meta[MESH_CALL]}
            last.replace_all_uses_with(gather)
            for gone in (*uses, cast, node):
                graph.erase_node(gone)
            # The facts and checks know the value by this name.
            gather.name = last.name

    return edited(gm, edit, finds=finds)


def _is_read_low(node: fx.Node, low: torch.dtype) -> bool:
    """Whether one cast to the low dtype, and its uses, are all that reads a gather."""
    call = node.meta.get(MESH_CALL)
    # A cast commutes with a gather, which moves elements; a sum over ranks it would
    # round before the sum.
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


# -- back in their places --------------------------------------------------------------


def with_mesh_calls(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm` with torch's calls; `gm` itself where it computes on no DTensors."""
    return edited(gm, _put_back, finds=_found)


def crossed(node: fx.Node, value: Any, inputs: Sequence[Any]) -> Any:
    """The result of a stand-in's call on DTensors, in a graph that has stand-ins.

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


def _put_back(graph: fx.Graph) -> None:
    inputs = graph.find_nodes(op="placeholder")
    for node in _found(graph):
        call: MeshCall = node.meta[MESH_CALL]
        args, kwargs = _resolved(call, inputs)
        low = node.target is gathered_low
        own = node.args if low else node.args[:1]
        node.target = gather_low if low else MESH_CALLS[call.name]
        node.args, node.kwargs = (*own, *args), kwargs
