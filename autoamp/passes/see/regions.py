"""The autocast regions of a model's own, followed node by node through its graph.

A model may hold `with torch.autocast(...)` itself.  The model's graph then has nodes
that enter and leave the region; the nodes between run as in the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.errors import CaptureError

CALLED_IN = "autoamp_called_in"
"""Set in the `meta` of a sub-graph: the regions it is called in, outermost first."""

Region = tuple[Any, ...]
"""The arguments of `torch.autocast`: device type, dtype, enabled, cache."""


class Regions:
    """The regions round the current node of a walk through a graph, in order.

    Example:
        >>> graph_module = fx.symbolic_trace(torch.nn.ReLU())
        >>> regions = Regions(graph_module)
        >>> for node in graph_module.graph.nodes:
        ...     regions.follow(node)
        ...     print(node, regions.is_on())
        input_1 None
        relu None
        output None
    """

    def __init__(self, gm: fx.GraphModule, outer: Sequence[Region] = ()) -> None:
        """Begins at the first node of `gm`, which is called in regions `outer`."""
        begun = gm.meta.get(CALLED_IN, outer)
        self._inside: list[tuple[fx.Node | None, Region]] = [(None, r) for r in begun]
        self._states: dict[Region, compat.AutocastState] = {}

    def follow(self, node: fx.Node) -> None:
        """Moves the walk on to `node`."""
        if node.target is compat.ENTER_AUTOCAST:
            self._inside.append((node, tuple(node.args)))
        elif node.target is compat.EXIT_AUTOCAST:
            self._inside = [each for each in self._inside if each[0] != node.args[0]]

    @property
    def inside(self) -> tuple[Region, ...]:
        """The regions round the current node, outermost first."""
        return tuple([region for _, region in self._inside])

    def is_on(self, *devices: str) -> bool | None:
        """Whether autocast is on in the innermost region; None outside all regions.

        Args:
            devices: the types of devices whose regions count; by default all.
        """
        counted = [r for r in self.inside if not devices or r[0] in devices]
        if not counted:
            return None
        # `torch.autocast(device, dtype)` is on.
        return bool(counted[-1][_ENABLED]) if len(counted[-1]) > _ENABLED else True

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Enters the same regions, for ops that are called to see their results."""
        if not self._inside:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for region in self.inside:
            # Made once for each region, which is entered anew for each of its nodes.
            if region not in self._states:
                self._states[region] = compat.autocast_state(*region[:3])
            stack.enter_context(compat.in_autocast(self._states[region]))
        return stack


def switches_on(gm: fx.GraphModule, devices: Collection[str]) -> bool:
    """Whether `gm`, or a body in it, enters autocast for one of these device types.

    A region in fp32 is none: it keeps numbers wide, as one that is switched off does.
    """
    return any(
        node.target is compat.ENTER_AUTOCAST
        and node.args[0] in devices
        and node.args[1] is not HIGH_DTYPE
        and (len(node.args) <= _ENABLED or bool(node.args[_ENABLED]))
        for each in gm.modules()
        if isinstance(each, fx.GraphModule)
        for node in each.graph.nodes
    )


_ENABLED = 2
"""The position of `enabled` among the arguments of `torch.autocast`."""


LOWERED_BODY = "autoamp_lowered_body"
"""Set in the `meta` of a sub-graph that is an ATen graph, to be rewritten as well: the
name of the op that calls the sub-graph."""

BODY_RECORDS = "autoamp_body_records"
"""Set beside `LOWERED_BODY`: whether grad mode is on where the body is called."""

LOW_INPUTS = "autoamp_low_inputs"
"""Set beside `LOWERED_BODY` once the body is rewritten: the positions of the inputs
that it reads in the compute dtype alone."""

BODY_LEFT = "autoamp_body_left"
"""Set in the `meta` of a body that stays as the user wrote it: the reason."""


@dataclass(frozen=True)
class Positions:
    """Positions among the arguments of a higher-order op.

    Attributes:
        bodies: the sub-graphs to rewrite.
        others: the sub-graphs that are called with the same values, not rewritten.
        shared: the values that every run of a body reads unchanged, as the last inputs
            of the body.  The op itself makes the inputs before these values: a value
            that goes round a loop, a slice.
    """

    bodies: tuple[int, ...]
    others: tuple[int, ...]
    shared: int


CONTROL_FLOW: Mapping[Any, Positions] = {
    compat.COND: Positions(bodies=(1, 2), others=(), shared=3),
    compat.WHILE_LOOP: Positions(bodies=(1,), others=(0,), shared=3),
    compat.SCAN: Positions(bodies=(0,), others=(), shared=3),
    compat.MAP: Positions(bodies=(0,), others=(), shared=2),
}


def shared_inputs(call: fx.Node, body: fx.GraphModule) -> Iterator[tuple[int, fx.Node]]:
    """Each operand that `call` hands to `body` as it is, after the input's position."""
    found = CONTROL_FLOW.get(call.target)
    operands: Any = call.args[1:] if found is None else call.args[found.shared]
    # The op itself makes the first inputs: what goes round a loop, a slice.
    first = len(body.graph.find_nodes(op="placeholder")) - len(operands)
    for at, operand in enumerate(operands, first):
        if isinstance(operand, fx.Node):
            yield at, operand


def given_low(call: fx.Node, bodies: Sequence[fx.GraphModule]) -> frozenset[str]:
    """The operands that all of a call's bodies read in the compute dtype alone."""
    low, wide = set[str](), set[str]()
    for body in bodies:
        inputs = body.graph.find_nodes(op="placeholder")
        for at, operand in shared_inputs(call, body):
            if at in body.meta.get(LOW_INPUTS, ()):
                low.add(operand.name)
            elif inputs[at].users:
                wide.add(operand.name)
    if call.target in CONTROL_FLOW:
        # The op makes inputs of its other operands: what goes round a loop is fp32.
        shared = CONTROL_FLOW[call.target].shared
        others = (*call.args[:shared], *call.args[shared + 1 :])
        fx.node.map_arg(others, lambda n: wide.add(n.name))
    return frozenset(low - wide)


def body_inputs(
    body: fx.GraphModule,
    shared: Sequence[Any],
    mode: compat.FakeTensorMode,
    needs_grad: bool,
) -> list[Any]:
    """Values to trace `body` with: new ones for the op's own inputs, then `shared`.

    Args:
        needs_grad: whether a gradient flows into the op.  If so, a gradient may flow
            into a value that goes round a loop, even if the first value takes none.

    Raises:
        CaptureError: nothing is known of an input.
    """
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    inputs: list[Any] = []
    for node in placeholders[: len(placeholders) - len(shared)]:
        value = node.meta.get("example_value", node.meta.get("val"))
        if value is None:
            raise CaptureError(f"nothing is recorded of its input {node.name}")
        if isinstance(value, torch.Tensor):
            floats = value.is_floating_point() or value.is_complex()
            with mode:
                value = compat.like(value, symbolic=True)
            value.requires_grad_(needs_grad and floats)
        inputs.append(value)
    return [*inputs, *shared]
