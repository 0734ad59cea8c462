"""Checks that gathers in the low dtype stand for a gather and its casts.

The two graphs are read side by side.  Each call of `gathered_low` must read what a
redistribution read that only gathers, must be made in the dtype in which all readers of
the redistribution read it, and must have their number of uses; all other nodes stay.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autoamp.check.standin import dtypes_of, where
from autoamp.errors import VerificationError
from autoamp.graph_functions.gathers import gathered_low
from autoamp.trace.meshes import MESH_CALL


def check_low_gathers(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Raises where `after` differs from `before` in more than low gathers.

    Raises:
        VerificationError: names the node.
    """
    old = {n.name: n for n in before.graph.nodes}
    gone = set(old) - {n.name for n in after.graph.nodes}
    for node in after.graph.nodes:
        was = old.get(node.name)
        if was is None:
            raise VerificationError(f"{where(node)} is new", nodes=[node.name])
        if node.target is gathered_low and was.target is not gathered_low:
            gone -= {n.name for n in _stands_for(node, was)}
        elif _shown(node) != _shown(was):
            raise VerificationError(f"{where(node)} changed", nodes=[node.name])
    if gone:
        raise VerificationError(f"{sorted(gone)} got lost", nodes=sorted(gone))
    for name, body in before.named_children():
        other = getattr(after, name)
        if isinstance(body, fx.GraphModule) and other is not body:
            check_low_gathers(body, other)


def _stands_for(node: fx.Node, was: fx.Node) -> Iterator[fx.Node]:
    """The nodes that a low gather at the place of `was` stands for."""
    value, dtype, uses = node.args
    gather = next((n for n in was.all_input_nodes if MESH_CALL in n.meta), was)
    call = gather.meta.get(MESH_CALL)
    readers = [u for u in gather.users if u is not was]
    sound = (
        call is not None
        and call.gathers
        and node.meta.get(MESH_CALL) is call
        and str(gather.args[0]) == str(value)
        and dtypes_of(was.meta["val"]) == [dtype] * int(str(uses))
        and all(set(u.users) == {was} for u in readers)
        and all(dtypes_of(u.meta["val"]) == [dtype] for u in readers)
    )
    if not sound:
        raise VerificationError(
            f"{where(node)} is not a gather whose readers all read {dtype}",
            nodes=[was.name],
        )
    yield from (gather, *readers)


def _shown(node: fx.Node) -> tuple[str, ...]:
    return str(node.target), repr(node.args), repr(node.kwargs)
