"""How much the rounding of each op, and of each cast, moves a model's results.

Each rounding makes an error e of a tensor v.  To first order a result R moves by
<dR/dv, e>.  The elements of e are taken to be independent with mean zero (rounding to
nearest), so that the expected square of the move is the sum of (dR/dv)^2 e^2, and the
squares of different roundings add up.

Of many numbers (all outputs, all gradients) the norm of the move is wanted.  With r
drawn from a standard normal distribution, E <r, move>^2 = ||move||^2, so that one
backward with r in the place of the outputs' gradient gives all that is needed.

A gradient moves in two ways: the forward values that it is computed with are rounded,
and gradients inside the backward are rounded.  With a random direction s of the
weights, <s, gradient> is the derivative of the loss along s.  So

* a rounding of the forward value v moves <s, gradient> by <dh/ds, e>, where h is the
  loss's gradient with respect to v, and dh/ds its derivative along s;
* a rounding of the gradient h moves it by <dv/ds, e>.

Both derivatives are differences between two steps, one at the weights and one at the
weights moved along s.  (This is the tangent that forward-mode differentiation gives;
Griewank and Walther, "Evaluating Derivatives", 2008, chapters 3 and 5.)

Where a cast would stand, only the readers behind it see its rounding.  So a graph runs
in fp32 with each operand read through an alias, and the gradient of the alias is the
gradient through this reader alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.analyse.verdict import CEILING, Classified, Mode
from autoamp.dtypes import largest, needs_loss_scale
from autoamp.graph_functions import checkpointed
from autoamp.node_by_node.runner import Observer, Runner
from autoamp.place.assign import OpKey, keys_of
from autoamp.rewrite.rewritten import Rewritten

RETURNED = "<returned>"
"""The reader of values that a graph returns."""


class Use(NamedTuple):
    """One value as one reader reads it, in one run of one graph.

    Attributes:
        graph, body, run: as in `ask.compare.Key`.
        reader: the node that reads; the value's own node for the value as it is made.
        value: the node that makes the value.
    """

    graph: int
    body: str
    run: int
    reader: str
    value: str


class Edge(NamedTuple):
    """A use of a value, in any capture of the model.

    Attributes:
        reader: the op that reads; None for a value that the graph returns.
        at: the place of the operand among the reader's fp32 operands.
        maker: the op that makes the value; None for a value from outside.
        mode: the precision in which the reader reads.
    """

    reader: OpKey | None
    at: int
    maker: OpKey | None
    mode: Mode

    @property
    def is_rounded(self) -> bool:
        """Whether a low reader reads the value in the low dtype."""
        return self.mode in ("same", "follow")


@dataclass(eq=False)
class Plan:
    """What the probe has to know of one graph, or of one body.

    Attributes:
        before: the graph as it was captured.
        keys: the key of each op, by its node.
        edges: the edge of each (reader, value).
        free: the nodes that a placement may lower.
        light: those whose result on rounded operands is worth computing: ops that are
            not allowed low for their own sake, draw no numbers and write nowhere.
        maker: gives the node that decides the precision of a value.
        records: for each result of the graph, whether it has a gradient.
        written: the values that share memory with one that is written to.
        bodies: the graphs of bodies, each with its plan.
    """

    before: fx.GraphModule
    keys: dict[str, OpKey]
    edges: dict[tuple[str, str], Edge]
    free: frozenset[str]
    light: frozenset[str]
    maker: Callable[[str], str]
    written: frozenset[str]
    records: tuple[bool, ...] = ()
    bodies: dict[fx.GraphModule, Plan] = field(default_factory=dict)


def plan_of(record: Rewritten) -> Plan:
    """The plan of a graph, of which the pass has made `record`."""
    classified, facts = record.classified, record.facts
    free = frozenset(
        n for n, v in classified.verdicts.items() if not v.pinned or v.origin == CEILING
    )
    written = frozenset(
        f.name for f in facts.nodes.values() if f.storage in facts.mutated
    )
    keys = keys_of(classified)
    edges = edges_of(classified, keys)
    light = frozenset(
        n.name
        for n in record.before.graph.nodes
        if n.name in free and not classified.is_allowed(n.name) and _is_plain(n)
    )
    plan = Plan(
        record.before,
        keys,
        edges,
        free,
        light,
        facts.producer,
        written,
        _records(record),
    )
    for body in record.bodies:
        plan.bodies[body.gm] = plan_of(body)
    return plan


def _records(record: Rewritten) -> tuple[bool, ...]:
    """For each result of a graph, whether it has a gradient in the model."""
    (output,) = record.before.graph.find_nodes(op="output")
    facts = record.facts.nodes
    return tuple(
        isinstance(each, fx.Node)
        and each.name in facts
        and facts[each.name].requires_grad
        for each in pytree.tree_leaves(output.args[0])
    )


def edges_of(
    classified: Classified, keys: Mapping[str, OpKey]
) -> dict[tuple[str, str], Edge]:
    """The edge of each use of a value in a graph, by the reader and the value."""
    facts = classified.facts
    edges: dict[tuple[str, str], Edge] = {}
    for name in classified.verdicts:
        for at, (operand, mode) in enumerate(classified.reads(name)):
            maker = keys.get(facts.producer(operand.value))
            edge = Edge(keys[name], at, maker, mode)
            edges.setdefault((name, operand.value), edge)
    for value in facts.returned:
        maker = keys.get(facts.producer(value))
        edges[RETURNED, value] = Edge(None, 0, maker, "high")
    return edges


@dataclass(eq=False)
class Trace:
    """The tensors of one call: each value, and each use of a value.

    Attributes:
        low: the dtype in which results are rounded; None to note no errors.
        made: each value that a node makes.
        errors: the error that rounding makes in each such value, where it makes one.
        used: each use, as the reader reads it.
        plans: the plan of each graph, by its number.
    """

    low: torch.dtype | None = None
    made: dict[Use, Tensor] = field(default_factory=dict)
    errors: dict[Use, Tensor] = field(default_factory=dict)
    used: dict[Use, Tensor] = field(default_factory=dict)
    plans: dict[tuple[int, str], Plan] = field(default_factory=dict)
    runs: dict[tuple[int, str], int] = field(default_factory=dict)

    def tensors(self) -> list[tuple[Use, Tensor]]:
        """Every value and every use, with its tensor."""
        return [*self.made.items(), *self.used.items()]

    def maker(self, use: Use) -> OpKey:
        """The op that makes a value."""
        plan = self.plans[use[:2]]
        return plan.keys[plan.maker(use.value)]

    def edge(self, use: Use) -> Edge:
        """The use, in any capture of the model."""
        return self.plans[use[:2]].edges[use.reader, use.value]


class Probe(Runner):
    """One run of a graph, or of a body, whose values and uses go into a trace."""

    def __init__(self, plan: Plan, trace: Trace, graph: int, body: str = "") -> None:
        super().__init__(plan.before, [_Unrolls()], is_body=bool(body))
        self.plan, self.trace, self.place = plan, trace, (graph, body)
        trace.plans[self.place] = plan
        self.forces = True
        self.number = trace.runs.get(self.place, 0)
        trace.runs[self.place] = self.number + 1

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """The arguments of a node, each fp32 operand as an alias of its own."""
        read: dict[fx.Node, Any] = {}

        def operand(at: fx.Node) -> Any:
            if at not in read:
                read[at] = self._apart(n, at, self.env[at])
            return read[at]

        return map_arg(n.args, operand), map_arg(n.kwargs, operand)

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node, whose fp32 result goes into the trace."""
        self.forces = True
        try:
            value = super().run_node(n)
        except RuntimeError:  # an op that cannot be differentiated by every operand
            self.forces = False
            value = super().run_node(n)
        if _is_fp32(value) and self.plan.maker(n.name) in self.plan.free:
            use = self._use(n.name, n.name)
            self.trace.made[use] = value
            if self.trace.low is not None:
                rounded = self._on_rounded(n, value)
                self.trace.errors[use] = rounding_error(rounded, self.trace.low)
        return value

    def _on_rounded(self, n: fx.Node, value: Tensor) -> Tensor:
        """The result of an op that is not allowed low on operands that are rounded.

        A ReLU or a view of rounded numbers is rounded already, and so makes no error.
        A product's result is rounded in any case, so that it is not computed again.
        """
        if n.name not in self.plan.light:
            return value

        def operand(at: fx.Node) -> Any:
            found = self.env[at]
            edge = self.plan.edges.get((n.name, at.name))
            if edge is None or not edge.is_rounded or not _is_fp32(found):
                return found
            return found.detach().to(self.trace.low).float()

        target: Any = n.target
        with torch.no_grad():
            found = target(*map_arg(n.args, operand), **map_arg(n.kwargs, operand))
        return found if _is_fp32(found) and found.shape == value.shape else value

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs one call; a checkpointed region runs as if it were not checkpointed."""
        if target is checkpointed:
            body, *rest = args
            return self._body(body)(*rest)
        return super().call_function(target, args, kwargs)

    def _apart(self, reader: fx.Node, at: fx.Node, value: Any) -> Any:
        name = RETURNED if reader.op == "output" else reader.name
        if not _is_fp32(value) or at.name in self.plan.written:
            return value
        if (name, at.name) not in self.plan.edges:
            return value
        if value.requires_grad:
            value = value.view_as(value)
        elif reader.op != "output" and self.forces:
            value = value.detach().requires_grad_()
        self.trace.used[self._use(name, at.name)] = value
        return value

    def _use(self, reader: str, value: str) -> Use:
        return Use(*self.place, self.number, reader, value)

    def _body(self, gm: fx.GraphModule) -> Callable[..., Any]:
        plan = self.plan.bodies.get(gm)
        children = dict(self.module.named_children())
        name = next((n for n, child in children.items() if child is gm), "")
        if plan is None:
            return super()._body(gm)
        graph, body = self.place

        def run(*args: Any) -> Any:
            path = f"{body}/{name}" if body else name
            return Probe(plan, self.trace, graph, path).run(*args)

        return run


class _Unrolls(Observer):
    """Has the bodies of branches and loops run node by node."""

    unrolls = True


def rounding_error(value: Tensor, low: torch.dtype) -> Tensor:
    """The error that rounding to the low dtype makes."""
    value = value.detach()
    rounded = value.to(low).float()
    return (rounded - value).masked_fill_(rounded == value, 0.0)  # also where infinite


def _is_plain(n: fx.Node) -> bool:
    """Whether a call may be made once more: it draws nothing, and writes nothing."""
    if not isinstance(n.target, compat.OpOverload):
        return False
    draws = torch.Tag.nondeterministic_seeded in n.target.tags
    return not draws and not compat.schema(n.target).is_mutable


def _is_fp32(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32


_LEAST = 1e-60
"""Stands for the size of a result that is zero, whose relative error has no meaning."""


@dataclass
class Squares:
    """Squares of errors that add up, for one measure, each relative to the result.

    Attributes:
        own: op to the square that it costs to have the op low.
        down: edge to the square if the reader is low and the value is not.
        up: edge to the square if the value is low and the reader is not.
        known: the ops from which a derivative of the result was found.
    """

    own: dict[OpKey, float] = field(default_factory=lambda: defaultdict(float))
    down: dict[Edge, float] = field(default_factory=lambda: defaultdict(float))
    up: dict[Edge, float] = field(default_factory=lambda: defaultdict(float))
    known: set[OpKey] = field(default_factory=set)


class Rounding:
    """Sums the squares of each measure over calls.

    Attributes:
        low: the compute dtype.
        found: the squares of each measure, by the measure's name.
        calls: how many calls the squares are averaged over.
    """

    def __init__(
        self, low: torch.dtype, found: Mapping[str, Squares], calls: int = 1
    ) -> None:
        self.low, self.found, self.calls = low, found, calls

    def moved(
        self, measure: str, trace: Trace, flows: Mapping[Use, Tensor], size: float
    ) -> None:
        """Adds what roundings of values do to a result.

        Args:
            flows: the derivative of the result with respect to each value and use.
            size: the square of the result's norm.
        """
        squares, size = self.found[measure], max(size * self.calls, _LEAST)
        for use, error in trace.errors.items():
            if use in flows:
                squares.known.add(trace.maker(use))
                square = _square(flows[use], error)
                squares.own[trace.maker(use)] += square / size
        for use, value in trace.used.items():
            edge = trace.edge(use)
            if use in flows and edge.is_rounded:
                squares.known.update(filter(None, (edge.reader,)))
                square = _square(flows[use], rounding_error(value, self.low))
                squares.down[edge] += square / size

    def moved_backward(
        self,
        measure: str,
        trace: Trace,
        tangents: Mapping[Use, Tensor],
        flows: Mapping[Use, Tensor],
        size: float,
    ) -> None:
        """Adds what roundings of gradients do to the gradients of weights.

        Args:
            tangents: the derivative of each use along the direction.
            flows: the loss's gradient with respect to each use.
            size: the square of the gradients' norm.
        """
        squares, size = self.found[measure], max(size * self.calls, _LEAST)
        scale = _loss_scale(flows.values(), self.low)
        for use, tangent in tangents.items():
            if use not in flows:
                continue
            error = rounding_error(flows[use] * scale, self.low) / scale
            square, edge = _square(tangent, error) / size, trace.edge(use)
            if edge.is_rounded and edge.reader is not None:
                squares.own[edge.reader] += square
            if edge.maker is not None:
                squares.up[edge] += square


def _square(flow: Tensor, error: Tensor) -> float:
    moved = (flow * error).masked_fill_(flow == 0, 0.0)  # an infinity that goes nowhere
    found = float(moved.square().sum(dtype=torch.float64))
    return math.inf if math.isnan(found) else found


def _loss_scale(flows: Iterable[Tensor], low: torch.dtype) -> float:
    """The loss scale with which gradients are rounded, a power of two."""
    if not needs_loss_scale(low):
        return 1.0
    most = max((float(f.abs().max()) for f in flows if f.numel()), default=0.0)
    if not 0.0 < most < math.inf:
        return 1.0
    return 2.0 ** min(15, math.floor(math.log2(largest(low) / most)) - 1)
