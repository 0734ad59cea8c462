"""Reads one node: its arguments, tensors, modules and source line."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.passes.ops import (
    HIDDEN_WRITES,
    STATISTICS,
    base_name,
    bodies_of,
    has_effect,
    mutated_arguments,
    overwritten_arguments,
)
from autoamp.passes.see.regions import LOWERED_BODY

KERNEL = "autoamp_kernel"
"""In the `meta` of a node that stands for several calls: a `ForChain`."""


@dataclass(frozen=True)
class ForChain:
    """What is known of the calls that one kernel stands for.

    Attributes:
        kernel: the name of the kernel in `passes/kernels/table.py`.
        calls: how many calls the model made.
        widens: whether type promotion would leave the result of the calls fp32, because
            one of the calls is denied or is a cast to fp32.
    """

    kernel: str
    calls: int
    widens: bool


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's `meta["val"]`."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    return []


def named_arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The arguments of a call of a torch op by the names of its schema."""
    if isinstance(node.target, compat.OpOverload):
        yield from zip(compat.argument_names(node.target), node.args, strict=False)
    else:
        yield from ((f"arg{i}", a) for i, a in enumerate(node.args))
    yield from node.kwargs.items()


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """Argument `name` of a call of a torch op, or `default` if the call lacks it."""
    return dict(named_arguments(node)).get(name, default)


def source_line(node: fx.Node) -> str:
    """`model.py:12: x = self.fc(x)`: the user's innermost line that made `node`."""
    return _innermost_line(node.stack_trace or "")


@functools.lru_cache(maxsize=1024)  # the nodes of one line share a trace
def _innermost_line(trace: str) -> str:
    lines = [s.strip() for s in trace.splitlines() if s.strip()]
    for where, code in zip(reversed(lines[:-1]), reversed(lines[1:]), strict=False):
        # A mode of the process, a default device say, calls each op from a line of its
        # own.
        if where.endswith(" in __torch_function__"):
            continue
        # From Python 3.11 on a line of carets may underline the failing code.
        if where.startswith("File ") and not set(code) <= {"^", "~"}:
            path, line = where.split('"')[1], where.split("line ")[1].split(",")[0]
            return f"{path}:{line}: {code}"
    return ""


def module_paths(node: fx.Node) -> tuple[str, ...]:
    """The modules a node was called in, outermost first."""
    return compat.paths_in(node.meta.get("nn_module_stack") or {})


def graph_paths(gm: fx.GraphModule) -> set[str]:
    """The paths of the modules that the calls of a graph were made in; "" for none."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    found = {path for g in graphs for node in g.nodes for path in module_paths(node)}
    return (
        found | {""} | {str(n.target) for n in gm.graph.nodes if n.op == "call_module"}
    )


def written_values(node: fx.Node) -> list[fx.Node]:
    """The operands that a call may write to.

    A custom Function (`mark_dirty`) or a branch may write to every operand, unless its
    bodies are known not to write.
    """
    if isinstance(node.target, compat.HigherOrderOperator):
        # A lowered body is known not to write to its inputs (`passes/see/regions.py`).
        unknown = (b for b in bodies_of(node) if LOWERED_BODY not in b.meta)
        writes = any(has_effect(n) for body in unknown for n in body.graph.nodes)
        return list(node.all_input_nodes) if writes else []
    if not isinstance(node.target, compat.OpOverload):
        return []
    names = mutated_arguments(node.target)
    return operands_in(node, names) if names else []


def written_input(lowered: fx.GraphModule) -> str | None:
    """The name of an input that ATen graph `lowered` writes to; None if there is none.

    If such an input were cast, the write would reach the cast and not the input.
    """
    inputs: dict[int, str] = {}
    for node in lowered.graph.nodes:
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor):
            inputs[compat.storage_id(value)] = node.name
        if not isinstance(node.target, compat.OpOverload):
            continue
        trains = argument(node, "training", argument(node, "use_input_stats", True))
        # A norm writes its running statistics only in training.
        if base_name(node.target) in HIDDEN_WRITES and trains is False:
            continue
        for written in written_values(node):
            tensor = written.meta.get("val")
            if isinstance(tensor, torch.Tensor) and compat.storage_id(tensor) in inputs:
                return inputs[compat.storage_id(tensor)]
    return None


def operands_in(node: fx.Node, names: Collection[str]) -> list[fx.Node]:
    """The operands of a call that stand in the arguments of these names."""
    found: list[fx.Node] = []
    for name, value in named_arguments(node):
        if name in names:
            fx.node.map_arg(value, found.append)
    return found


def read_operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose numbers the result of a call depends on.

    It does not depend on the running statistics of a norm that computes with those of
    its batch, on memory that is overwritten, and on tensors that lend a shape.
    """
    if not isinstance(node.target, compat.OpOverload):
        return node.all_input_nodes
    unread = set(overwritten_arguments(node.target))
    given = dict(named_arguments(node))
    if not any(given.get(flag) is False for flag in ("training", "use_input_stats")):
        # Outside training a norm computes with its running statistics.
        unread.update(set(STATISTICS) & set(mutated_arguments(node.target)))
    return operands_in(node, given.keys() - unread)
