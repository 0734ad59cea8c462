"""Shows a graph that computes on DTensors to the passes as a graph of whole tensors.

A DTensor behaves as the whole tensor that the ranks hold together, so that an op on
DTensors is the op on whole tensors, and has the same category, the same dtypes and the
same rules.  What differs is a rank's share of the work, which the prices read, and the
calls that cross between a DTensor and what a rank holds
(`passes/functions/dtensor_crossings.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.errors import CaptureError
from autoamp.passes.functions.dtensor_crossings import IN_WHOLE

MESH_CALL = "autoamp_mesh_call"
"""In the `meta` of a node that stands for a call of torch's: a `MeshCall`."""

ON_MESH = "autoamp_on_mesh"
"""Set in the `meta` of a node that reads or makes a DTensor."""

HELD = "autoamp_held"
"""In the `meta` of a node: the share of its value that one rank holds."""

COMPUTED = "autoamp_computed"
"""In the `meta` of a node: the share of the op that one rank computes."""


DTENSORS = "DTensors (tensor parallel)"
NESTED = "nested tensors"


@dataclass(frozen=True)
class Input:
    """Stands for an input of the graph among the arguments of a call."""

    position: int


@dataclass(frozen=True)
class MeshCall:
    """A call that crosses between DTensors and what ranks hold, as the model wrote it.

    Attributes:
        name: the name of the call, such as "redistribute".
        args, kwargs: the arguments behind the first, with an `Input` for each input of
            the graph.
        sends: whether the forward sends something.
        sends_back: whether the backward may send something.
        gathers: whether each rank gets values that other ranks hold, and none of them
            is a sum.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sends: bool
    sends_back: bool
    gathers: bool


def computes_on_dtensors(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether an input or a value of a graph of Dynamo's is a DTensor."""
    return any(map(compat.is_distributed, _values(gm, inputs)))


def kind_of_tensors(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """The kind of tensors in a graph of Dynamo's that the passes may not follow.

    The result is "" for a graph of tensors that the passes are made for.
    """
    if computes_on_dtensors(gm, inputs):
        return DTENSORS
    return NESTED if computes_on_nested(gm, inputs) else ""


def computes_on_nested(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether an input or a value of a graph of Dynamo's is a nested tensor."""
    values = _values(gm, inputs)
    return any(isinstance(v, torch.Tensor) and v.is_nested for v in values)


def _values(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    return [*inputs, *(n.meta.get("example_value") for n in gm.graph.nodes)]


def whole_inputs(
    gm: fx.GraphModule, inputs: Sequence[Any], mode: compat.FakeTensorMode
) -> list[Any]:
    """`inputs` with a fake whole tensor for each DTensor, and None for meshes."""
    holders = gm.graph.find_nodes(op="placeholder")
    recorded = [n.meta.get("example_value", n.meta.get("val")) for n in holders]
    pairs = zip(inputs, recorded, strict=True)
    return [_whole(value, known, mode) for value, known in pairs]


def _whole(value: Any, known: Any, mode: compat.FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, _NUMBERS) else None
    is_of_another = isinstance(value, compat.FakeTensor) and value.fake_mode is not mode
    if not (compat.is_distributed(value) or is_of_another):
        return value  # fake tensors that a model is called with are made anew
    like = known if compat.is_distributed(known) else value
    with mode, torch.no_grad():
        made = compat.like(like, symbolic=True)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=value.requires_grad)
    return made.requires_grad_(value.requires_grad)


_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


class Meshes:
    """Records the calls of a graph that cross between DTensors and ranks' parts."""

    def __init__(self, gm: fx.GraphModule) -> None:
        """Notes where the inputs of `gm` stand."""
        inputs = gm.graph.find_nodes(op="placeholder")
        own = [*gm.parameters(), *gm.buffers()]  # which a trace has as inputs, too
        self._offset = len(own)
        self._positions = {node: at for at, node in enumerate(inputs)}

    def run(self, n: fx.Node, args: Sequence[Any]) -> torch.Tensor | None:
        """The result of a node that crosses; None for any other node.

        Args:
            args: the values of the node's arguments, in whole tensors.

        Raises:
            CaptureError: the call is one that the passes cannot see through.
        """
        name = compat.mesh_call(n)
        if compat.hides_mesh_call(n):
            raise CaptureError(
                f"{n.name}: Dynamo of torch {torch.__version__} hides the mesh and the "
                "placements of a call on DTensors; that of torch 2.13 shows them"
            )
        if not name:
            return None
        first = n.args[0] if n.args else None
        made = n.meta.get("example_value")
        if not (isinstance(first, fx.Node) and isinstance(made, torch.Tensor)):
            raise CaptureError(f"{n.name}: a call of {name} that Dynamo left open")
        value, known = args[0], first.meta.get("example_value")
        op = IN_WHOLE.get(name, IN_WHOLE["redistribute"])
        size = [_size(each, value, at, n) for at, each in enumerate(made.shape)]
        result: torch.Tensor = op(value, size, _strides(made, size, n))

        def position(node: fx.Node) -> Any:
            if node not in self._positions:
                raise CaptureError(f"{n.name}: its mesh or placement is computed")
            return Input(self._positions[node])

        behind, named = fx.map_arg((n.args[1:], dict(n.kwargs)), position)
        sends, sends_back, gathers = _traffic(name, known, made)
        call = MeshCall(
            name,
            tuple(behind),
            dict(named),
            sends=sends,
            sends_back=sends_back,
            gathers=gathers,
        )
        proxy = compat.recorded_proxy(result)
        # Outside a trace (in a checkpointed region that is run for its results) there
        # is no node to note the call on.
        if proxy is not None:
            compat.proxy_node(proxy).meta[MESH_CALL] = call
        return result

    def given(self, nodes: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Operands of a sub-graph, with the record of an input for each mesh.

        Args:
            nodes: the operands in the graph.
            values: their values, in which a mesh is None.
        """
        pairs = zip(nodes, values, strict=True)
        return [
            compat.recorded_input(self._offset + self._positions[node])
            if value is None and node in self._positions
            else value
            for node, value in pairs
        ]

    def note_shares(self, n: fx.Node, made: Sequence[fx.Node]) -> None:
        """Notes a rank's share of what the nodes `made` for `n` hold and compute."""
        result = n.meta.get("example_value")
        operands = [o.meta.get("example_value") for o in n.all_input_nodes]
        leaves = pytree.tree_leaves(result)
        computed = _share_computed([*operands, *leaves])
        held = min((_share_held(v) for v in leaves), default=1.0)
        if not any(map(compat.is_distributed, [*operands, *leaves])):
            return
        for node in made:
            node.meta[ON_MESH] = True
            node.meta[COMPUTED], node.meta[HELD] = computed, held


def note_held(lowered: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Notes of each input of a graph which share of the whole one rank holds."""
    placeholders = lowered.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, inputs, strict=True):
        if compat.is_distributed(value):
            node.meta[HELD] = _share_held(value)


def _size(size: Any, value: torch.Tensor, at: int, n: fx.Node) -> Any:
    """One size of a result: a number, or made of the size of operand `value` there.

    Raises:
        CaptureError: the size depends on the call's input, and is neither the operand's
            size nor a multiple or a part of it.
    """
    if isinstance(size, int) or size.node.expr.is_number:
        return compat.hint(size)
    given = value.shape[at] if at < value.dim() else None
    if isinstance(given, torch.SymInt):
        one, other = compat.hint(size), compat.hint(given)
        # Each rank's part put together, or a part of the whole.
        made = given * (one // other) if one >= other else given // (other // one)
        # Expressions are compared, since a comparison of sizes would set a guard.
        if made.node.expr == size.node.expr:
            return made
    raise CaptureError(f"{n.name}: a size of its result, {size}, is not one of its own")


def _strides(made: torch.Tensor, size: Sequence[Any], n: fx.Node) -> list[Any]:
    """The strides of a result: numbers, or those of contiguous memory."""
    strides = list(made.stride())
    if all(isinstance(s, int) or s.node.expr.is_number for s in strides):
        return [*map(compat.hint, strides)]
    if not made.is_contiguous():
        raise CaptureError(
            f"{n.name}: its result lies in memory by a size that may change"
        )
    found: list[Any] = []
    step: Any = 1
    for each in reversed(size):
        found.insert(0, step)
        step = step * each
    return found


def _share_held(value: Any) -> float:
    """The share of a DTensor's elements that this rank holds; 1 of anything else."""
    if not compat.is_distributed(value):
        return 1.0
    # `int` of a symbolic size would make one graph for each size.
    whole = math.prod(map(compat.hint, value.shape))
    return (
        math.prod(map(compat.hint, compat.own_memory(value).shape)) / whole
        if whole
        else 1.0
    )


def _share_computed(values: Sequence[Any]) -> float:
    """The share of an op that this rank computes, of the op's operands and results.

    Where the mesh holds all of them whole along one of its dimensions, each rank along
    this dimension does the whole op; elsewhere each does its part.
    """
    meshed = [v for v in values if compat.is_distributed(v)]
    if not meshed:
        return 1.0
    mesh = meshed[0].device_mesh
    share = 1.0
    for at in range(mesh.ndim):
        if any(not v.placements[at].is_replicate() for v in meshed):
            share /= int(mesh.size(at))
    return share


def _traffic(name: str, before: Any, after: Any) -> tuple[bool, bool, bool]:
    """The communication of mesh call `name`, which makes `after` of `before`.

    Whether the forward sends something; whether the backward may, since the gradient of
    a value that every rank holds whole may be a sum over the ranks; and whether the
    call gives each rank the parts of others, and adds nothing up.
    """
    made = after.placements if compat.is_distributed(after) else ()
    if name == "to_local":
        return False, False, False
    if name == compat.FROM_LOCAL:
        return False, any(p.is_replicate() for p in made), False
    if not (compat.is_distributed(before) and made):
        return True, True, False
    pairs = zip(before.placements, made, strict=True)
    changed = [(a, b) for a, b in pairs if a != b]
    sends = any(not a.is_replicate() for a, _ in changed)
    # Only a gather moves elements and leaves them as they are: a cast commutes with it.
    gathers = all(a.is_shard() and b.is_replicate() for a, b in changed)
    return sends, bool(changed), name == "redistribute" and bool(changed) and gathers
