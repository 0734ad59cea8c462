"""Reads calls of a graph, and tells which of them no kernel may replace."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.passes.decide.pins import kept_by
from autoamp.passes.ops import base_name, has_effect
from autoamp.passes.rules import Category, Rules, autocast_rules, family
from autoamp.passes.see.nodes import module_paths, tensors_of, written_values
from autoamp.passes.see.regions import Regions


def name_of(node: fx.Node) -> str:
    """The name of the op that is called, such as `aten::add`; empty for no op."""
    is_op = isinstance(node.target, compat.OpOverload)
    return base_name(node.target) if is_op else ""


def is_of(node: fx.Node, ops: Collection[str]) -> bool:
    """Whether one of `ops`, given by their names, is called."""
    return name_of(node) in ops


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of a tensor; None for any other value."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def is_cast(node: fx.Node) -> bool:
    """Whether a call is the user's cast from fp32 to fp32, which changes nothing."""
    return is_of(node, family("cast")) and all(
        dtype_of(n) == HIGH_DTYPE for n in (node, *node.all_input_nodes)
    )


def sizes_of(tensor: torch.Tensor) -> tuple[int | str, ...]:
    """The shape; symbolic sizes as text, since to compare them would add guards."""
    return tuple(s if isinstance(s, int) else str(s) for s in tensor.shape)


def layout_of(tensor: torch.Tensor) -> tuple[int | str, ...]:
    """The shape and strides; symbolic ones as text, as for `sizes_of`."""
    every = (*tensor.shape, *tensor.stride())
    return tuple(s if isinstance(s, int) else str(s) for s in every)


@dataclass(frozen=True)
class Chain:
    """Calls that together compute one result.

    Attributes:
        nodes: the calls, in graph order; the last one makes the result.
        data: the tensor that the chain reads.
        vectors: the other tensors that the chain reads, each of the length of the last
            dimension of `data`.
        calls_inside: the calls in the graphs of a custom Function; 0 for no Function.
    """

    nodes: tuple[fx.Node, ...]
    data: fx.Node
    vectors: tuple[fx.Node, ...]
    calls_inside: int = 0

    @property
    def calls(self) -> int:
        """The number of calls the model made."""
        return self.calls_inside or len(self.nodes)

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]


@dataclass(frozen=True)
class Allowed:
    """Tells whether calls may become a kernel.

    Attributes:
        rules, built_in: the rules in force, and autoamp's own, without the user's.
        keep: the user's patterns of modules that stay fp32.
        off: names of kernels that are switched off, or slower than the calls.
        device: type of the device that the graph is to run on, if not where it is.
        left: names of nodes that a failed check leaves as they are.
        in_regions: the calls in autocast regions of the model's own.
    """

    rules: Rules
    built_in: Rules
    keep: Sequence[str]
    off: Sequence[str]
    device: str | None
    left: Collection[str] = ()
    in_regions: Collection[fx.Node] = ()

    def takes(self, calls: Sequence[fx.Node]) -> bool:
        """Whether a kernel may take the place of `calls`."""
        # A rule of the user's about `tanh` is about each `tanh`, so that none may
        # vanish in a kernel.  A module that stays fp32 stays as it is.
        return not any(
            self.rules.lookup(node.target) != self.built_in.lookup(node.target)
            or kept_by(self.keep, module_paths(node))
            or node.name in self.left
            or node in self.in_regions
            for node in calls
        )

    def widens(self, node: fx.Node) -> bool:
        """Whether autocast may leave a call's result fp32 whatever it reads."""
        rule = self.rules.lookup(node.target)
        if rule is None or is_cast(node):
            return True
        device = self.device or node.meta["val"].device.type
        listed = autocast_rules(device).lookup(node.target)
        return any(
            one.category is Category.DENY
            or any(
                case.category is Category.DENY
                and (case.test != "device_is" or case.value == device)
                for case in one.when
            )
            for one in (rule, listed)
            if one is not None
        )


def in_regions(gm: fx.GraphModule, graph: fx.Graph) -> set[fx.Node]:
    """The calls in autocast regions of the model's own, which run as they are.

    Args:
        gm: says in which regions its graph is called.
        graph: a copy of the graph of `gm`.
    """
    regions = Regions(gm)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        regions.follow(node)
        if regions.is_on() is not None:
            found.add(node)
    return found


def exposed_storages(graph: fx.Graph) -> set[int]:
    """The storages that are written to in the graph, or could be after it."""
    results = graph.output_node().all_input_nodes
    return written_storages(graph.nodes) | {
        compat.storage_id(t) for n in results for t in tensors_of(n.meta.get("val"))
    }


def constant(node: fx.Node) -> Tensor | None:
    """The tensor that calls make of numbers alone; None if they read anything else."""
    calls = calls_from_sizes(node)
    if calls is None:
        return None
    # The capture's fake mode is on, and would make no numbers.
    with compat.on_real_numbers():
        try:
            return computed(calls)
        except Exception:  # noqa: BLE001 - then the calls stay as they are
            return None


def written_storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages that some of the calls `nodes` may write to."""
    written = [value for node in nodes for value in written_values(node)]
    return {
        compat.storage_id(t) for n in written for t in tensors_of(n.meta.get("val"))
    }


def is_size(node: fx.Node) -> bool:
    """Whether a value is a symbolic size."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def calls_from_sizes(made: fx.Node) -> list[fx.Node] | None:
    """The calls that make a value of sizes and numbers, in order, symbolic sizes too.

    Returns:
        None if a call reads an input or a weight, or if another call may write to the
        value: these calls alone then do not make it.
    """
    found: dict[fx.Node, None] = {}
    todo = [made]
    while todo:
        node = todo[-1]
        if is_size(node):
            found[todo.pop()] = None
            continue
        left = [n for n in node.all_input_nodes if n not in found]
        if not isinstance(node.target, compat.OpOverload) or has_effect(node):
            return None
        if left:
            todo += left
        else:
            found[todo.pop()] = None
    tensors = [n for n in found if isinstance(n.meta.get("val"), Tensor)]
    return None if _are_written(tensors) else [*found]


def _are_written(nodes: Collection[fx.Node]) -> bool:
    """Whether a call writes to one of the values, under this or another name."""
    # By storage: a write to a view of the value counts as well.
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


def computed(
    calls: Sequence[fx.Node], known: Mapping[fx.Node, Tensor] | None = None
) -> Tensor:
    """The result on CPUs of the last of `calls`, which read each other and `known`."""
    values: dict[fx.Node, Any] = {**(known or {})}
    for node in calls:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        args, kwargs = fx.node.map_aggregate((args, kwargs), _on_cpu)
        assert callable(node.target)
        values[node] = node.target(*args, **kwargs)
    result: Tensor = values[calls[-1]]
    return result


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value
