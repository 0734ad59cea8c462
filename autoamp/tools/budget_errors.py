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

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import largest, needs_loss_scale
from autoamp.passes.check.held import Held
from autoamp.passes.decide.assign import Chosen, OpKey, keys_of
from autoamp.passes.decide.verdict import CEILING, Classified
from autoamp.passes.functions import checkpointed
from autoamp.passes.node_by_node import Observer, Runner
from autoamp.passes.record import Prepared, Rewritten
from autoamp.runtime.examine import before_rewrite
from autoamp.runtime.stand_in import Heard, StandIn, copied, floats_of, untouched
from autoamp.tools.budget import GRADIENTS, LOSS, METRIC, OUTPUTS

RETURNED = "<returned>"
"""The reader of values that a graph returns."""

_SURE = 2.0
"""A loss is one number, whose error may be small by chance: twice the expected root
mean square is what 95 of 100 normal errors stay below."""

_LEAST = 1e-60
"""Stands for the size of a result that is zero, whose relative error has no meaning."""


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
        is_rounded: whether a low reader reads the value in the low dtype.
    """

    reader: OpKey | None
    at: int
    maker: OpKey | None
    is_rounded: bool


def edges_of(
    classified: Classified, keys: Mapping[str, OpKey]
) -> dict[tuple[str, str], Edge]:
    """The edge of each use of a value in a graph, by the reader and the value."""
    facts = classified.facts
    edges: dict[tuple[str, str], Edge] = {}
    for name in classified.verdicts:
        for at, (operand, mode) in enumerate(classified.reads(name)):
            maker = keys.get(facts.producer(operand.value))
            edge = Edge(keys[name], at, maker, mode in ("same", "follow"))
            edges.setdefault((name, operand.value), edge)
    for value in facts.returned:
        maker = keys.get(facts.producer(value))
        edges[RETURNED, value] = Edge(None, 0, maker, False)
    return edges


@dataclass(eq=False)
class Squares:
    """Squares of errors that add up, for one measure, each relative to the result.

    Attributes:
        low: the compute dtype.
        calls: how many calls the squares are averaged over.
        own: op to the square that it costs to have the op low.
        down: edge to the square if the reader is low and the value is not.
        up: edge to the square if the value is low and the reader is not.
        known: the ops from which a derivative of the result was found.
    """

    low: torch.dtype
    calls: int = 1
    own: dict[OpKey, float] = field(default_factory=lambda: defaultdict(float))
    down: dict[Edge, float] = field(default_factory=lambda: defaultdict(float))
    up: dict[Edge, float] = field(default_factory=lambda: defaultdict(float))
    known: set[OpKey] = field(default_factory=set)

    def add(self, trace: Trace, flows: Mapping[Use, Tensor], size: float) -> None:
        """Adds what roundings of values do to a result.

        Args:
            flows: the derivative of the result with respect to each value and use.
            size: the square of the result's norm.
        """
        size = max(size * self.calls, _LEAST)
        for use, error in trace.errors.items():
            if use in flows:
                self.known.add(trace.maker(use))
                self.own[trace.maker(use)] += _square(flows[use], error) / size
        for use, value in trace.used.items():
            edge = trace.edge(use)
            if use in flows and edge.is_rounded and edge.reader is not None:
                self.known.add(edge.reader)
                error = rounding_error(value, self.low)
                self.down[edge] += _square(flows[use], error) / size

    def add_backward(
        self,
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
        size = max(size * self.calls, _LEAST)
        scale = _loss_scale(flows.values(), self.low)
        for use in tangents.keys() & flows.keys():
            error = rounding_error(flows[use] * scale, self.low) / scale
            square, edge = _square(tangents[use], error) / size, trace.edge(use)
            if edge.is_rounded and edge.reader is not None:
                self.own[edge.reader] += square
            if edge.maker is not None:
                self.up[edge] += square


class Plan:
    """What the probe has to know of one graph, or of one body.

    Attributes:
        before: the graph as it was captured.
        keys: the key of each op, by its node.
        edges: the edge of each (reader, value).
        free: the nodes that a placement may lower.
        light: those whose result on rounded operands is worth computing: ops that are
            not allowed low for their own sake, draw no numbers and write nowhere.
        written: the values that share memory with one that is written to.
        records: for each result of the graph, whether it has a gradient in the model.
        bodies: the graphs of bodies, each with its plan.
    """

    def __init__(self, record: Rewritten) -> None:
        classified, facts = record.classified, record.facts
        self.before = record.before
        self.maker = facts.producer
        self.keys = keys_of(classified)
        self.edges = edges_of(classified, self.keys)
        self.free = {
            n
            for n, v in classified.verdicts.items()
            if not v.pinned or v.origin == CEILING
        }
        self.light = {
            n.name
            for n in record.before.graph.nodes
            if n.name in self.free
            and not classified.is_allowed(n.name)
            and _is_plain(n)
        }
        nodes = facts.nodes
        self.written = {n for n, f in nodes.items() if f.storage in facts.mutated}
        (output,) = record.before.graph.find_nodes(op="output")
        self.records = [
            isinstance(each, fx.Node)
            and each.name in nodes
            and nodes[each.name].requires_grad
            for each in pytree.tree_leaves(output.args[0])
        ]
        self.bodies = {body.gm: Plan(body) for body in record.bodies}


@dataclass(eq=False)
class Trace:
    """The tensors of one call: each value, and each use of a value.

    Attributes:
        low: the dtype in which results are rounded; None to note no errors.
        made: each value that a node makes.
        errors: the error that rounding makes in each such value, where it makes one.
        used: each use, as the reader reads it.
        plans: the plan of each graph and body.
        runs: how often each has run.
    """

    low: torch.dtype | None = None
    made: dict[Use, Tensor] = field(default_factory=dict)
    errors: dict[Use, Tensor] = field(default_factory=dict)
    used: dict[Use, Tensor] = field(default_factory=dict)
    plans: dict[tuple[int, str], Plan] = field(default_factory=dict)
    runs: Counter[tuple[int, str]] = field(default_factory=Counter)

    def maker(self, use: Use) -> OpKey:
        """The op that makes a value."""
        plan = self.plans[use[:2]]
        return plan.keys[plan.maker(use.value)]

    def edge(self, use: Use) -> Edge:
        """The use, in any capture of the model."""
        return self.plans[use[:2]].edges[use.reader, use.value]

    def flows(
        self,
        results: Sequence[Tensor],
        at: Sequence[Tensor] | None = None,
        more: Sequence[Tensor] = (),
    ) -> tuple[dict[Use, Tensor], Sequence[Tensor | None]]:
        """The gradient of each value and use, and of the tensors `more`."""
        every = [*self.made.items(), *self.used.items()]
        uses = [(use, t) for use, t in every if t.requires_grad]
        if not uses or not any(r.requires_grad for r in results):
            return {}, [None] * len(more)
        wanted = [*(t for _, t in uses), *more]
        found = torch.autograd.grad(
            results, wanted, at, retain_graph=True, allow_unused=True
        )
        pairs = zip(uses, found, strict=False)
        return {use: f for (use, _), f in pairs if f is not None}, found[len(uses) :]


class Probe(Runner):
    """One run of a graph, or of a body, whose values and uses go into a trace."""

    def __init__(self, plan: Plan, trace: Trace, graph: int, body: str = "") -> None:
        super().__init__(plan.before, [_Unrolls()], is_body=bool(body))
        self.plan, self.trace, self.place = plan, trace, (graph, body)
        trace.plans[self.place] = plan
        self.forces = True
        self.number = trace.runs[self.place]
        trace.runs[self.place] += 1

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
        if plan is None:
            return super()._body(gm)
        name = next((n for n, child in self.module.named_children() if child is gm), "")
        graph, body = self.place
        path = f"{body}/{name}" if body else name
        return lambda *args: Probe(plan, self.trace, graph, path).run(*args)


class _Unrolls(Observer):
    """Has the bodies of branches and loops run node by node."""

    unrolls = True


class Calibration(StandIn):
    """A stand-in whose graphs run in fp32 under a probe.

    Attributes:
        most_runs: the most runs of graphs in one call so far.
        plans: the plan of each graph so far.
    """

    most_runs = 0

    @functools.cached_property
    def plans(self) -> dict[Prepared, Plan]:
        return {}

    def counted(self) -> Counter[Prepared]:
        """How often a call runs each graph."""
        runs: Counter[Prepared] = Counter()

        def play(prepared: Prepared, args: tuple[Any, ...]) -> Any:
            runs[prepared] += 1
            return self.engine.as_captured(prepared, args)

        self.engine.play = play
        with untouched(self.twin, trains=self.trains):
            args, kwargs = copied(self.call)
            self.twin(*args, **kwargs)
        self.most_runs = max(self.most_runs, runs.total())
        return runs

    @property
    def records_between(self) -> bool:
        """Whether gradients are recorded between the graphs of a call, too.

        In inference each graph is run as it was captured, without gradients; its probe
        records them inside.  Only where a call runs several graphs must they be
        recorded between the graphs as well, and the model is captured once more so.
        """
        return self.trains or self.most_runs > 1

    def traced(self, low: torch.dtype | None = None) -> tuple[Trace, Any]:
        """One call; its values and uses, and the output.

        Args:
            low: the dtype in which results are rounded; None to note no errors.
        """
        trace = Trace(low)
        numbers: dict[Prepared, int] = {}

        def play(prepared: Prepared, args: tuple[Any, ...]) -> Any:
            number = numbers.setdefault(prepared, len(numbers))
            if prepared not in self.plans:
                assert prepared.rewritten is not None
                self.plans[prepared] = Plan(prepared.rewritten)
            plan = self.plans[prepared]
            with torch.enable_grad():
                found = Probe(plan, trace, number).run(*args)
            # Between graphs the model may ask whether its own tensors have gradients.
            return _as_promised(found, plan) if self.records_between else found

        self.engine.play = play
        args, kwargs = copied(self.call)
        return trace, self.twin(*args, **kwargs)

    def exact(self) -> Heard:
        """One call in fp32, and its backward."""

        def play(prepared: Prepared, args: tuple[Any, ...]) -> Any:
            assert prepared.rewritten is not None
            return Runner(before_rewrite(prepared.rewritten), []).run(*args)

        return self._heard(play, 1.0)

    def placed(self, chosen: Chosen | None = None) -> Heard:
        """One call as placed; by default in the placement of least time."""
        own = self.engine.options
        options = own if chosen is None else dataclasses.replace(own, chosen=chosen)

        def play(prepared: Prepared, args: tuple[Any, ...]) -> Any:
            return Runner(self.record(prepared, options).gm, [Held()]).run(*args)

        return self._heard(play, self.scale)

    def _heard(self, play: Callable[..., Any], scale: float) -> Heard:
        found = Heard()
        self.engine.play = play
        self.run(self.twin, found, scale)
        return found

    def learn(
        self,
        found: Mapping[str, Squares],
        metric: Callable[[Any], Any] | None = None,
        seed: int = 0,
    ) -> None:
        """Adds the squares of one batch, for each measure that has some.

        Args:
            metric: a function of the output that can be differentiated, or None.
            seed: of the random directions.
        """
        try:
            self._learn(found, metric, seed)
        except RuntimeError:  # an op of inference that torch cannot differentiate
            if self.records_between:
                raise
            self.most_runs = 2  # nothing was added before the op failed
            self._learn(found, metric, seed)

    def _learn(
        self,
        found: Mapping[str, Squares],
        metric: Callable[[Any], Any] | None,
        seed: int,
    ) -> None:
        draws = torch.Generator("cpu").manual_seed(seed)
        weights = [p for p in self.twin.parameters() if p.requires_grad]
        with untouched(self.twin, trains=self.records_between), torch.enable_grad():
            with torch.set_grad_enabled(self.records_between):
                trace, output = self.traced(self.engine.record.low)
            if OUTPUTS in found:
                outs = [t for t in floats_of(output) if t.requires_grad]
                size = sum(float(t.detach().double().square().sum()) for t in outs)
                flows, _ = trace.flows(outs, [_drawn(t, draws) for t in outs])
                found[OUTPUTS].add(trace, flows, size)
            if METRIC in found and metric is not None:
                outs = [t for t in floats_of(metric(output)) if t.requires_grad]
                flows, _ = trace.flows(outs, [_drawn(t, draws) for t in outs])
                found[METRIC].add(trace, flows, float(sum(t.numel() for t in outs)))
            if not self.trains:
                return
            loss = self.loss_fn(output).float()
            flows, gradients = trace.flows([loss], more=weights)
            if LOSS in found:
                size = float(loss.detach()) ** 2 / _SURE**2
                found[LOSS].add(trace, flows, size)
        if GRADIENTS in found:
            size = sum(float(g.square().sum()) for g in gradients if g is not None)
            trace.made.clear()  # frees the graph of the call
            trace.used = {use: t.detach() for use, t in trace.used.items()}
            self._learn_gradients(found[GRADIENTS], trace, flows, size, draws)

    def _learn_gradients(
        self,
        squares: Squares,
        trace: Trace,
        flows: Mapping[Use, Tensor],
        size: float,
        draws: torch.Generator,
    ) -> None:
        """Adds what roundings do to the gradients, by a step at moved weights."""
        weights = [p for p in self.twin.parameters() if p.requires_grad]
        with untouched(self.twin, trains=True):
            step = _move(weights, squares.low, draws)
            moved, output = self.traced()
            later, _ = moved.flows([self.loss_fn(output).float()])
            with torch.no_grad():
                tangents = _differences(moved.used, trace.used, step)
                changes = _differences(later, flows, step)
                squares.add(trace, changes, size)
                squares.add_backward(trace, tangents, flows, size)


def _differences(
    later: Mapping[Use, Tensor], before: Mapping[Use, Tensor], step: float
) -> dict[Use, Tensor]:
    """The derivative of each tensor along a direction."""
    return {
        use: (t - before[use]) / step
        for use, t in later.items()
        if use in before and t.shape == before[use].shape
    }


def _as_promised(results: Any, plan: Plan) -> Any:
    """The results of a graph, of which only those have gradients that have some."""
    found, spec = pytree.tree_flatten(results)
    if len(found) != len(plan.records):
        return results
    for at, (value, records) in enumerate(zip(found, plan.records, strict=True)):
        if isinstance(value, Tensor) and not records:
            found[at] = value.detach()
    return pytree.tree_unflatten(found, spec)


def _move(weights: Sequence[Tensor], low: torch.dtype, draws: torch.Generator) -> float:
    """Moves the weights along a random direction; returns the length of the step.

    The move is as large, relative to the weights, as the rounding of a number to the
    low dtype on average (a quarter of the distance between two numbers).  A smooth
    model is linear over such a step; a ReLU has its sign changed about as often as by
    the roundings themselves, which a derivative does not see.
    """
    length = math.sqrt(sum(float(p.detach().square().sum()) for p in weights))
    count = sum(p.numel() for p in weights)
    step = torch.finfo(low).eps / 4 * length / math.sqrt(max(1, count))
    step = step or torch.finfo(low).eps
    with torch.no_grad():
        for p in weights:
            p.add_(_drawn(p, draws), alpha=step)
    return step


def _drawn(like: Tensor, draws: torch.Generator) -> Tensor:
    """Normal numbers with the shape, dtype and device of `like`; drawn in fp32."""
    made = torch.randn(like.shape, generator=draws, dtype=torch.float32, device="cpu")
    return made.to(like)


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
