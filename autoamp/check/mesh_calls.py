"""Checks that torch's calls on DTensors are back where they were, and nothing else."""

from __future__ import annotations

from typing import Any

from torch import fx

from autoamp.check.standin import where
from autoamp.errors import VerificationError
from autoamp.graph_functions.gathers import gathered_low
from autoamp.trace.meshes import MESH_CALL


def check_mesh_calls(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Raises where the graphs differ in more than the calls that cross.

    Each call of `after` must have the name and the arguments that the capture noted of
    the model's own call, and read the value that the op in its place reads.

    Raises:
        VerificationError: some other call changed, or a call has other arguments.
    """
    inputs = [n.name for n in after.graph.nodes if n.op == "placeholder"]
    for old, new in zip(before.graph.nodes, after.graph.nodes, strict=True):
        same = _shown(old) == _shown(new)
        if _stands_for_a_call(old):
            same = old.name == new.name and _is_back(old, new, inputs)
        if not same:
            raise VerificationError(
                f"{where(new)} is not the call that the model makes on the mesh",
                nodes=[old.name],
            )
    for name, body in before.named_children():
        other = getattr(after, name)
        if isinstance(body, fx.GraphModule) and other is not body:
            check_mesh_calls(body, other)


def _stands_for_a_call(node: fx.Node) -> bool:
    ours = getattr(node.target, "namespace", "") == "autoamp"
    return MESH_CALL in node.meta and (ours or node.target is gathered_low)


def _is_back(old: fx.Node, new: fx.Node, inputs: list[str]) -> bool:
    call = old.meta[MESH_CALL]
    low = old.target is gathered_low
    own = old.args if low else old.args[:1]
    wanted = "gather_low" if low else call.name
    return (
        getattr(new.target, "__name__", "") == wanted
        and repr(new.args[: len(own)]) == repr(own)
        and _written(new.args[len(own) :], inputs) == _written(call.args, inputs)
        and _written(new.kwargs, inputs) == _written(call.kwargs, inputs)
    )


def _written(value: Any, inputs: list[str]) -> str:
    """Arguments in words, with the names of inputs for their positions."""

    def name(each: Any) -> Any:
        position = getattr(each, "position", None)
        return f"<{each if position is None else inputs[position]}>"

    if isinstance(value, dict):
        return repr({key: _written(each, inputs) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        return repr([_written(each, inputs) for each in value])
    return str(name(value))


def _shown(node: fx.Node) -> Any:
    return node.op, node.name, node.target, repr(node.args), repr(node.kwargs)
