"""Runs a graph node by node, with the real rounding, and leaves a trail of its values.

Bodies of checkpointed regions, branches and loops are run node by node as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from autoamp import compat
from autoamp.analyse.nodes import written_values
from autoamp.graph_functions import checkpointed
from autoamp.node_by_node.promised import Promised
from autoamp.op_names import base_name
from autoamp.overflow.bodies import UNROLLED
from autoamp.overflow.location import Location, given_location
from autoamp.overflow.python_calls import outside_location
from autoamp.overflow.trail import Step, Trail, floats_in, largest_in

Names = Mapping[int, Location]
"""The names of weights and inputs, by the `id` of the tensor."""


class Recorder(Promised):
    """One run of one graph, or of one body."""

    def __init__(
        self,
        gm: fx.GraphModule,
        trail: Trail,
        names: Names | None = None,
        *,
        exact: bool = False,
        also: Callable[[fx.Node, Any], None] | None = None,
    ) -> None:
        """Prepares a run.

        Args:
            names: better names for inputs than the graph has.
            exact: whether a value that leaves its range is computed in fp32 as well,
                from the same operands, which waits for the device at each node.
            also: called with each node and its value.
        """
        super().__init__(gm)
        self.trail, self.names, self.exact, self.also = trail, names or {}, exact, also
        self.latest: dict[fx.Node, Step] = {}
        self._is_body = False

    def run(self, *args: Any, **options: Any) -> Any:
        """Runs the graph on `args`; see `fx.Interpreter.run`."""
        try:
            result = super().run(*args, **options)
            if not (self._is_body or compat.inside_backward()):
                made = map(self.trail.maker, floats_in(_flat(result)))
                self.trail.outputs += [step for step in made if step is not None]
            return result
        finally:
            self.env.clear()  # an error may hold this object, which holds inputs
            if not self._is_body:
                self.trail.let_go()

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node, and notes how large its value is."""
        # In a backward, a checkpointed region is run once more: nothing is new there.
        if n.op == "output" or compat.inside_backward():
            return super().run_node(n)
        before = self._operands_in_fp32(n) if self.exact and _may_write(n) else None
        value = super().run_node(n)
        if self.also is not None:
            self.also(n, value)
        tensors = floats_in(value)
        if not tensors:
            return value
        # The nodes of a body have made the results of its call.
        passes_on = n.target is operator.getitem or _runs_bodies(n)
        known = self.trail.maker(tensors[0]) if passes_on else None
        if n.op in ("placeholder", "get_attr"):
            self._note_given(n, value)
        elif known is not None:
            self.latest[n] = known
        else:
            self._note(n, tensors, before)
        return value

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs one call; the body of a region, branch or loop runs node by node."""
        if target in UNROLLED and not compat.inside_backward():
            return UNROLLED[target](self.body, self.trail, *args)
        return super().call_function(target, args, kwargs)

    def body(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """The function that runs the body of a region, branch or loop."""

        def run(*args: Any) -> Any:
            body = Recorder(
                gm, self.trail, self.names, exact=self.exact, also=self.also
            )
            body._is_body = True
            return body.run(*args)

        return run

    def _note_given(self, n: fx.Node, value: Any) -> None:
        known = self.trail.maker(value)
        if known is not None:  # a value of another graph, or of the graph around
            self.latest[n] = known
            return
        made = outside_location(value) if self.exact else None
        if made is not None:  # Python code between graphs
            step = Step(n, largest_in([value]), value.dtype, location=made)
            self.latest[n] = self.trail.add(step, [value])
            self.trail.claim(step, [value])
            return
        self.trail.begins(value)
        weight = n.op == "get_attr" or isinstance(value, nn.Parameter)
        location = self.names.get(id(value)) or given_location(n, is_weight=weight)
        step = Step(n, largest_in([value]), value.dtype, location=location)
        self.latest[n] = self.trail.add(step)

    def _note(
        self, n: fx.Node, tensors: list[torch.Tensor], before: tuple[Any, Any] | None
    ) -> None:
        operands = [self.latest[o] for o in n.all_input_nodes if o in self.latest]
        seen = [] if _is_unset(n) else tensors
        step = Step(n, largest_in(seen), tensors[0].dtype, operands)
        self.trail.add(step, tensors)
        self.trail.claim(step, tensors)
        self.latest[n] = step
        for written in written_values(n):
            self._renew(written, step)
        if self.exact and not step.is_finite and all(o.is_finite for o in operands):
            step.wide = self._in_fp32(n, step, before)

    def _renew(self, written: fx.Node, step: Step) -> None:
        """Makes `step` the maker of every value in the memory of `written`."""
        memory = self.env.get(written)
        if not isinstance(memory, torch.Tensor):
            return
        where = compat.storage_id(memory)
        for node, value in self.env.items():
            if isinstance(value, torch.Tensor) and compat.storage_id(value) == where:
                self.latest[node] = step
                self.trail.renew(value, step)

    # -- in fp32 -------------------------------------------------------------------

    def _operands_in_fp32(self, n: fx.Node) -> tuple[Any, Any]:
        def wide(node: fx.Node) -> Any:
            value = self.env[node]
            if not isinstance(value, torch.Tensor):
                return value
            value = value.detach().clone()
            return value.float() if value.is_floating_point() else value

        args, kwargs = (fx.map_arg(each, wide) for each in (n.args, n.kwargs))
        return fx.node.map_aggregate((args, kwargs), _widened)

    def _in_fp32(
        self, n: fx.Node, step: Step, before: tuple[Any, Any] | None
    ) -> float | None:
        """The magnitude of the result in fp32; None where the op cannot tell."""
        if step.is_cast:
            return max((o.largest for o in step.operands), default=None)
        if n.op != "call_function" or not isinstance(n.target, compat.OpOverload):
            return None
        args, kwargs = before or self._operands_in_fp32(n)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                return float(largest_in(floats_in(n.target(*args, **kwargs))))
            except RuntimeError:  # a kernel that takes one dtype only
                return None


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _may_write(n: fx.Node) -> bool:
    return n.op == "call_function" and bool(written_values(n))


def _runs_bodies(n: fx.Node) -> bool:
    return n.target is checkpointed or n.target in UNROLLED


def _is_unset(n: fx.Node) -> bool:
    """Whether a node makes memory that nothing was written to."""
    if not isinstance(n.target, compat.OpOverload):
        return False
    return "empty" in base_name(n.target)


def _widened(value: Any) -> Any:
    low = (torch.float16, torch.bfloat16)
    return torch.float32 if value in low and isinstance(value, torch.dtype) else value
