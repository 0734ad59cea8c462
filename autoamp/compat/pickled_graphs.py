"""Pickles a graph with its names for another process; torch's own pickle renames nodes.

Inductor's cache finds the code of a graph by the graph's text, names included.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate


@dataclass(frozen=True)
class _Name:
    """Stands for a node in the arguments of a later node."""

    name: str


class _Tensor(NamedTuple):
    """All that a compiler asks about an input."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    is_parameter: bool


class _Graph(NamedTuple):
    nodes: list[tuple[str, str, Any, Any, Any]]
    bodies: dict[str, _Graph]


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "node", value.name
        if isinstance(value, OpOverload):
            return "op", str(value)
        if isinstance(value, HigherOrderOperator):
            return "higher", value.name()
        if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat)):
            raise pickle.PicklingError("the graph holds a tensor or a symbolic size")
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, given: Any) -> Any:
        kind, name = given
        if kind == "node":
            return _Name(name)
        if kind == "higher":
            return getattr(torch.ops.higher_order, name)
        found: Any = torch.ops
        for part in name.split("."):
            found = getattr(found, part)
        return found


def dump_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> bytes:
    """A graph and its inputs as bytes, without metadata.

    Raises:
        Exception: the graph holds a tensor, a symbolic size or something else that
            another process cannot be handed.
    """
    stream = io.BytesIO()
    _Pickler(stream).dump((_described(gm), [_description(each) for each in inputs]))
    return stream.getvalue()


def load_graph(data: bytes) -> tuple[fx.GraphModule, list[Any]]:
    """The graph and its inputs, as fake tensors."""
    described, inputs = _Unpickler(io.BytesIO(data)).load()
    # Inductor's cache takes no graph without an environment of shapes.
    with FakeTensorMode(shape_env=ShapeEnv()):
        given = [_fake(each) for each in inputs]
    return _module(described), given


def _described(gm: fx.GraphModule) -> _Graph:
    bodies = {}
    for node in gm.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        body = getattr(gm, node.target, None)
        if not isinstance(body, fx.GraphModule):
            raise pickle.PicklingError(f"the graph holds more than ops ({node.target})")
        bodies[node.target] = _described(body)
    nodes = [(n.op, n.name, n.target, n.args, n.kwargs) for n in gm.graph.nodes]
    return _Graph(nodes, bodies)


def _module(described: _Graph) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}

    def resolved(value: Any) -> Any:
        return made[value.name] if isinstance(value, _Name) else value

    for op, name, target, args, kwargs in described.nodes:
        given = map_aggregate(args, resolved), map_aggregate(kwargs, resolved)
        made[name] = graph.create_node(op, target, *given, name=name)
    bodies = {name: _module(body) for name, body in described.bodies.items()}
    return fx.GraphModule(bodies, graph)


def _description(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Tensor(
        tuple(map(int, value.shape)),
        tuple(map(int, value.stride())),
        int(value.storage_offset()),
        value.dtype,
        value.device,
        value.requires_grad,
        isinstance(value, torch.nn.Parameter),
    )


def _fake(each: Any) -> Any:
    if not isinstance(each, _Tensor):
        return each
    spans = [(n - 1) * step for n, step in zip(each.size, each.stride, strict=True)]
    length = each.offset + 1 + sum(spans) if 0 not in each.size else each.offset
    memory = torch.empty(length, dtype=each.dtype, device=each.device)
    tensor = memory.as_strided(each.size, each.stride, each.offset)
    if each.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=each.needs_grad)
    return tensor.requires_grad_(each.needs_grad)
