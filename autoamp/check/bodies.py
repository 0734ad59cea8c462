"""Finds the inputs that the sub-graphs of a graph gained, and their callers."""

from __future__ import annotations

from typing import Any

from torch import fx

from autoamp.check.twins import Twins
from autoamp.graph_functions import checkpointed
from autoamp.trace.control_flow import CONTROL_FLOW


def is_called(twins: Twins, name: str) -> bool:
    """Whether the graph after still takes sub-graph `name` as an operand."""
    nodes = twins.gms[1].graph.nodes
    return any(n.op == "get_attr" and n.target == name for n in nodes)


def copies_in(twins: Twins, name: str, body: fx.GraphModule) -> dict[str, str | None]:
    """The inputs that a body gained, each with the input that it is a copy of."""
    given = [n.name for n in body.graph.nodes if n.op == "placeholder"]
    for call in twins.gms[1].graph.nodes:
        takes = [n for n in call.all_input_nodes if n.op == "get_attr"]
        if all(n.target != name for n in takes):
            continue
        operands = _given_to_body(call)
        if operands is None or len(operands) > len(given):
            return {}
        offset = len(given) - len(operands)
        known: dict[str, str] = {}
        found: dict[str, str | None] = {}
        for at, operand in enumerate(operands):
            if not isinstance(operand, fx.Node):
                continue
            stood = twins.named(operand, twins.new_stands)
            inner = given[offset + at]
            if operand.name in twins.may.copies and stood in known:
                found[inner] = known[stood]
            known.setdefault(stood, inner)
        return found
    return {}


def _given_to_body(call: fx.Node) -> list[Any] | None:
    """The values that a call gives to its body, the last inputs of the body."""
    if call.target is checkpointed:
        return list(call.args[1:])
    if call.target in CONTROL_FLOW:
        return list(call.args[CONTROL_FLOW[call.target].shared])  # type: ignore[arg-type]
    return None
