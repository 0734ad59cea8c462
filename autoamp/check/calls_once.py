"""Checks that calls which are gone were made before, with the same value."""

from __future__ import annotations

from torch import fx

from autoamp import compat
from autoamp.check.call_facts import calls_bodies, has_effect
from autoamp.check.standin import where
from autoamp.errors import VerificationError
from autoamp.trace.meshes import MESH_CALL


def check_calls_once(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Raises where `after` lacks more than calls on the mesh that are made twice.

    Each call that is gone must have a twin that stays before it, with the same name,
    arguments and value, and nothing with an effect in between; all its readers must
    read the twin, and all else must stay.

    Raises:
        VerificationError: names the node.
    """
    staying = {n.name for n in after.graph.nodes}
    stands: dict[str, str] = {}
    before_it: list[fx.Node] = []
    rest = iter(after.graph.nodes)
    for old in before.graph.nodes:
        if old.name not in staying:
            stands[old.name] = _twin(old, before_it, stands)
            continue
        new = next(rest, None)
        if new is None or _read(old, stands) != _read(new, {}):
            raise VerificationError(f"{where(old)} changed", nodes=[old.name])
        if has_effect(old.target) or calls_bodies(old) or _changes_mode(old):
            before_it.clear()
        before_it.append(old)
    if next(rest, None) is not None:
        raise VerificationError("a node is new", nodes=[])
    for name, body in before.named_children():
        other = getattr(after, name)
        if isinstance(body, fx.GraphModule) and other is not body:
            check_calls_once(body, other)


def _changes_mode(node: fx.Node) -> bool:
    return node.target in compat.MODE_CHANGES


def _twin(gone: fx.Node, before_it: list[fx.Node], stands: dict[str, str]) -> str:
    call = gone.meta.get(MESH_CALL)
    for node in before_it:
        if (
            call is not None
            and node.target is gone.target
            and node.meta.get(MESH_CALL) == call
            and _read(node, stands)[2:] == _read(gone, stands)[2:]
        ):
            return node.name
    raise VerificationError(f"{where(gone)} got lost", nodes=[gone.name])


def _read(node: fx.Node, stands: dict[str, str]) -> tuple[str, ...]:
    """A node's name, target and arguments, with the twins of operands that are gone."""

    def named(operand: fx.Node) -> str:
        return stands.get(operand.name, operand.name)

    shown = fx.map_arg((node.args, node.kwargs), named)
    return node.name, str(node.target), repr(shown)
