"""Tensors that calls make of sizes and numbers alone, such as a mask of positions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
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


def written_storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages that some of the calls `nodes` write to."""
    return {
        compat.storage_id(value)
        for node in nodes
        if isinstance(node.target, compat.OpOverload) and mutates(node.target)
        for operand in _written_operands(node)
        if isinstance(value := operand.meta.get("val"), Tensor)
    }


def _written_operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that a call writes to, by the schema of its op."""
    assert isinstance(node.target, compat.OpOverload)
    for at, argument in enumerate(compat.schema(node.target).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[at] if at < len(node.args) else None
            found: list[fx.Node] = []
            fx.map_arg(node.kwargs.get(argument.name, given), found.append)
            yield from found


def _made_from_sizes(made: fx.Node) -> list[fx.Node] | None:
    """The calls that make a value, in order; None if they read an input or a weight.

    Another call may write to the value: these calls alone then do not make it.
    """
    found: dict[fx.Node, None] = {}
    todo = [made]
    while todo:
        node = todo[-1]
        left = [n for n in node.all_input_nodes if n not in found]
        if not isinstance(node.target, compat.OpOverload) or has_effect(node):
            return None
        if left:
            todo += left
        else:
            found[todo.pop()] = None
    return None if _are_written(found) else [*found]


def _are_written(nodes: Collection[fx.Node]) -> bool:
    """Whether a call writes to one of the values, under this or another name."""
    own = {compat.storage_id(node.meta["val"]) for node in nodes}
    seen, todo = {*nodes}, [*nodes]
    while todo:
        users = [user for user in todo.pop().users if user not in seen]
        if not own.isdisjoint(written_storages(users)):
            return True
        for user in users:
            value = user.meta.get("val")
            if isinstance(value, Tensor) and compat.storage_id(value) in own:
                seen.add(user)
                todo.append(user)
    return False


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
