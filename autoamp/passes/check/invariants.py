"""The changes that no pass may make, whatever else its own check allows.

A pass may not make the graph wait for the device, may not set a state of the process,
and may not let a result share memory with another result, or with an input, where the
two had memory of their own.
"""

from __future__ import annotations

import enum
import operator
from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx

from autoamp import compat
from autoamp.errors import VerificationError
from autoamp.passes.check.standin import where


class _Kind(enum.Enum):
    PLAIN = enum.auto()
    WAITS = enum.auto()
    SETS = enum.auto()
    MAY_SHARE = enum.auto()


_SETTERS = ("set_", "_set_", "_enter_", "_exit_", "manual_seed", "use_deterministic")
"""How the names of functions begin that set a state of the process."""


@lru_cache(maxsize=4096)
def _kind(target: Any) -> _Kind:
    if not isinstance(target, compat.OpOverload):
        if target is operator.getitem:
            return _Kind.MAY_SHARE
        name = getattr(target, "__name__", "")
        return _Kind.SETS if name.startswith(_SETTERS) else _Kind.PLAIN
    # On a GPU such an op stops Python until all kernels before it have run.
    waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    if waits & {*target.tags}:
        return _Kind.WAITS
    shares = any(r.alias_info is not None for r in compat.schema(target).returns)
    return _Kind.MAY_SHARE if shares else _Kind.PLAIN


class Footprint(NamedTuple):
    """The effects of a graph beside its results.

    Attributes:
        waits: how often each op is called that waits for the device.
        sets: how often each function is called that sets a state of the process.
        memory: the value whose memory each result shows, in the order of results.
    """

    waits: Counter[Any]
    sets: Counter[Any]
    memory: tuple[fx.Node, ...]


def footprint(gm: fx.GraphModule) -> Footprint:
    """The effects of `gm` alone; its bodies have footprints of their own."""
    waits, sets = Counter[Any](), Counter[Any]()
    results: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            kind = _kind(node.target)
            if kind is _Kind.WAITS:
                waits[node.target] += 1
            elif kind is _Kind.SETS:
                sets[node.target] += 1
        elif node.op == "output":
            fx.map_arg(node.args, lambda n: results.append(_memory(n)))
    return Footprint(waits, sets, tuple(results))


def _memory(node: fx.Node) -> fx.Node:
    """The value whose memory `node` shows, as far as schemas tell."""
    while (
        node.op == "call_function"
        and _kind(node.target) is _Kind.MAY_SHARE
        and node.all_input_nodes
    ):
        source = node.all_input_nodes[0]
        # `to.dtype` is a view by its schema, and a copy where the dtype is another.
        if _dtype(source) is not _dtype(node):
            break
        node = source
    return node


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def check_always(after: fx.GraphModule, was: Footprint, now: Footprint) -> None:
    """Raises if a pass made a change that no pass may make.

    Args:
        was, now: the footprints of the graph before and of `after`.

    Raises:
        VerificationError: `after` waits, sets a state, or shares memory anew.
    """
    for does, more in (
        ("waits for the device", now.waits - was.waits),
        ("sets a state of the process", now.sets - was.sets),
    ):
        if more:
            nodes = [n for n in after.graph.nodes if n.target in more]
            names = [n.name for n in nodes]
            raise VerificationError(f"{where(nodes[-1])} {does}", nodes=names)
    if len(was.memory) != len(now.memory):
        raise VerificationError(
            f"the graph gives {len(now.memory)} results and gave {len(was.memory)}"
        )
    met: dict[fx.Node, int] = {}
    for at, (memory, shown) in enumerate(zip(was.memory, now.memory, strict=True)):
        # Two results that show one memory now have to have shown one before.
        first = met.setdefault(shown, at)
        if was.memory[first] is not memory:
            told = f"result {at} shows the memory of result {first}"
            raise VerificationError(told, nodes=[shown.name])
        # A caller that writes to such a result would write to a weight, or to its own
        # input.
        if shown.op in _GIVEN and memory.op not in _GIVEN:
            told = f"result {at} shows the memory of {where(shown)}"
            raise VerificationError(told, nodes=[shown.name])


_GIVEN = ("placeholder", "get_attr")
