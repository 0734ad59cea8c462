"""Tensors that calls make of sizes and numbers alone, such as a mask of positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.ops import has_effect, mutates


def number_of(value: Any) -> float | None:
    """The number that an argument is, also where calls make a 0-dim tensor of it."""
    if isinstance(value, fx.Node):
        known = value.meta.get("val")
        if not isinstance(known, Tensor) or known.dim():
            return None
        found = constant(value)
        return None if found is None else float(found)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def constant(node: fx.Node) -> Tensor | None:
    """The tensor that calls make of sizes and numbers alone; None if they read more."""
    calls = _made_from_sizes(node)
    if calls is None:
        return None
    with compat.on_real_numbers():
        try:
            return _computed(calls)
        except Exception:  # noqa: BLE001 - then the calls stay as they are
            return None


def written_storages(graph: fx.Graph) -> set[int]:
    """The storages that some call of a graph writes to."""
    return {
        compat.storage_id(value)
        for node in graph.nodes
        if isinstance(node.target, compat.OpOverload) and mutates(node.target)
        for operand in node.all_input_nodes
        if isinstance(value := operand.meta.get("val"), Tensor)
    }


def _made_from_sizes(made: fx.Node) -> list[fx.Node] | None:
    """The calls that make a value, in order; None if they read an input or a weight.

    A value that some other call writes to is not what these calls make.
    """
    found: dict[fx.Node, None] = {}
    todo = [made]
    while todo:
        node = todo.pop()
        if not isinstance(node.target, compat.OpOverload) or has_effect(node):
            return None
        found[node] = None
        todo.extend(n for n in node.all_input_nodes if n not in found)
    written = written_storages(made.graph)
    if any(compat.storage_id(node.meta["val"]) in written for node in found):
        return None
    order = {node: i for i, node in enumerate(made.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _computed(calls: list[fx.Node]) -> Tensor:
    values: dict[fx.Node, Any] = {}
    for node in calls:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        args, kwargs = fx.node.map_aggregate((args, kwargs), _on_cpu)
        assert callable(node.target)
        values[node] = node.target(*args, **kwargs)
    result: Tensor = values[calls[-1]]
    return result


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value
