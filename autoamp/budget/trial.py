"""Calls a stand-in of a model on the user's batches: what roundings do, in theory and
in truth.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.ask.examine import before_rewrite
from autoamp.ask.stand_in import (
    Call,
    Heard,
    StandIn,
    copied,
    floats_of,
    relative_error,
    untouched,
)
from autoamp.budget.budget import GRADIENTS, LOSS, METRIC, OUTPUTS, Budget
from autoamp.budget.sensitivity import Plan, Probe, Rounding, Trace, Use, plan_of
from autoamp.errors import OptionError
from autoamp.node_by_node.held import Held
from autoamp.node_by_node.runner import Runner
from autoamp.pipeline.prepared import Prepared
from autoamp.place.assign import Chosen
from autoamp.printable import class_name

PROBES = 1
"""Random directions for each batch.  The squares of many ops add up, which averages the
chance of one direction out: of a small GPT-2 one and four directions gave errors that
differed by 2 %."""

_SURE = 2.0
"""A loss is one number, whose error may be small by chance: twice the expected root
mean square is what 95 of 100 normal errors stay below."""


class Calibration(StandIn):
    """A stand-in whose graphs run in fp32 under a probe.

    Attributes:
        most_runs: the most runs of graphs in one call so far.
    """

    most_runs = 0

    @functools.cached_property
    def plans(self) -> dict[Prepared, Plan]:
        """The plan of each graph so far."""
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
        self.most_runs = max(self.most_runs, sum(runs.values()))
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
                self.plans[prepared] = plan_of(prepared.rewritten)
            plan = self.plans[prepared]
            with torch.enable_grad():
                found = Probe(plan, trace, number).run(*args)
            # Between graphs the model may ask whether its own tensors have gradients.
            return _as_promised(found, plan) if self.records_between else found

        self.engine.play = play
        args, kwargs = copied(self.call)
        return trace, self.twin(*args, **kwargs)

    def learn(
        self, rounding: Rounding, metric: Callable[[Any], Any] | None, seed: int
    ) -> None:
        """Adds the squares of one batch, for each measure that has some.

        Args:
            metric: a function of the output that can be differentiated, or None.
            seed: of the random directions.
        """
        try:
            self._learn(rounding, metric, seed)
        except RuntimeError:  # an op of inference that torch cannot differentiate
            if self.records_between:
                raise
            self.most_runs = 2
            self._learn(rounding, metric, seed)

    def _learn(
        self, rounding: Rounding, metric: Callable[[Any], Any] | None, seed: int
    ) -> None:
        """Adds the squares of one batch; nothing is added before an op has failed."""
        draws = torch.Generator("cpu").manual_seed(seed)
        weights = [p for p in self.twin.parameters() if p.requires_grad]
        with untouched(self.twin, trains=self.records_between), torch.enable_grad():
            with torch.set_grad_enabled(self.records_between):
                trace, output = self.traced(rounding.low)
            outs = [t for t in floats_of(output) if t.requires_grad]
            if OUTPUTS in rounding.found:
                self._outputs(rounding, OUTPUTS, trace, outs, draws, relative=True)
            if METRIC in rounding.found and metric is not None:
                given = [t for t in floats_of(metric(output)) if t.requires_grad]
                self._outputs(rounding, METRIC, trace, given, draws, relative=False)
            if not self.trains:
                return
            loss = self.loss_fn(output).float()
            flows, gradients = _flows(trace, [loss], None, weights)
            size = float(loss.detach()) ** 2 / _SURE**2
            if LOSS in rounding.found:
                rounding.moved(LOSS, trace, flows, size)
            values = {use: t.detach() for use, t in trace.used.items()}
        if GRADIENTS not in rounding.found:
            return
        size = sum(float(g.square().sum()) for g in gradients if g is not None)
        for _ in range(PROBES):
            self._gradients(rounding, trace, (values, flows), size * PROBES, draws)

    def _outputs(
        self,
        rounding: Rounding,
        measure: str,
        trace: Trace,
        results: Sequence[Tensor],
        draws: torch.Generator,
        *,
        relative: bool,
    ) -> None:
        """Adds what roundings do to the norm of some results of the call."""
        if not results:
            return
        size = float(sum(t.numel() for t in results))
        if relative:
            size = sum(float(t.detach().double().square().sum()) for t in results)
        for _ in range(PROBES):
            at = [_drawn(t, draws) for t in results]
            flows, _none = _flows(trace, results, at, ())
            rounding.moved(measure, trace, flows, size * PROBES)

    def _gradients(
        self,
        rounding: Rounding,
        trace: Trace,
        base: tuple[Mapping[Use, Tensor], Mapping[Use, Tensor]],
        size: float,
        draws: torch.Generator,
    ) -> None:
        """Adds what roundings do to the gradients, by a step at moved weights."""
        values, flows = base
        weights = [p for p in self.twin.parameters() if p.requires_grad]
        with untouched(self.twin, trains=True):
            step = _move(weights, rounding.low, draws)
            moved, output = self.traced()
            loss = self.loss_fn(output).float()
            later, _none = _flows(moved, [loss], None, ())
            tangents = {
                use: (t.detach() - values[use]) / step
                for use, t in moved.used.items()
                if use in values and t.shape == values[use].shape
            }
            changes = {
                use: (t - flows[use]) / step
                for use, t in later.items()
                if use in flows and t.shape == flows[use].shape
            }
            rounding.moved(GRADIENTS, trace, changes, size)
            rounding.moved_backward(GRADIENTS, trace, tangents, flows, size)


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


def _flows(
    trace: Trace,
    results: Sequence[Tensor],
    at: Sequence[Tensor] | None,
    more: Sequence[Tensor],
) -> tuple[dict[Use, Tensor], Sequence[Tensor | None]]:
    """The gradient of each value and use, and of the tensors `more`."""
    uses = [(u, t) for u, t in trace.tensors() if t.requires_grad]
    wanted = [t for _, t in uses]
    if not wanted or not any(r.requires_grad for r in results):
        return {}, [None] * len(more)
    found = torch.autograd.grad(
        results, [*wanted, *more], at, retain_graph=True, allow_unused=True
    )
    pairs = zip(uses, found, strict=False)
    flows = {use: f for (use, _), f in pairs if f is not None}
    return flows, found[len(wanted) :]


def batches_of(given: Any) -> list[Call]:
    """The batches of `calibrate_on`, each as the arguments of one call."""
    return [_call_of(each) for each in given]


def _call_of(batch: Any) -> Call:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, list):
        batch = tuple(batch)
    if not isinstance(batch, tuple):
        return (batch,), {}
    if len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict):
        return batch
    return batch, {}


def _drawn(like: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    """Normal numbers with the shape, dtype and device of `like`; drawn in fp32."""
    made = torch.randn(like.shape, generator=draws, dtype=torch.float32, device="cpu")
    return made.to(like)


class Judge:
    """Measures the errors of placements on one batch after another.

    Attributes:
        bench: the stand-in that is called.
        budget: the budget, whose measures are taken.
        measures: the names of the measures.
    """

    def __init__(
        self, bench: Calibration, budget: Budget, measures: Collection[str]
    ) -> None:
        self.bench, self.budget, self.measures = bench, budget, measures

    def exact(self) -> Heard:
        """One call in fp32."""

        def play(prepared: Prepared, args: tuple[Any, ...]) -> Any:
            assert prepared.rewritten is not None
            return Runner(before_rewrite(prepared.rewritten), []).run(*args)

        return self._heard(play, 1.0)

    def placed(self, chosen: Chosen | None) -> Heard:
        """One call as placed; None for the placement of least time."""
        own = self.bench.engine.options
        options = own if chosen is None else dataclasses.replace(own, chosen=chosen)

        def play(prepared: Prepared, args: tuple[Any, ...]) -> Any:
            gm = self.bench.record(prepared, options).gm
            return Runner(gm, [Held()]).run(*args)

        return self._heard(play, self.bench.scale)

    def _heard(self, play: Callable[..., Any], scale: float) -> Heard:
        found = Heard()
        self.bench.engine.play = play
        self.bench.run(self.bench.twin, found, scale)
        return found

    def autocast(self, model: nn.Module, exact: Heard) -> dict[str, float]:
        """The errors under `torch.autocast`; empty where it raises."""
        found = self.bench.under_autocast(model)
        return {} if found is None else self.errors(found, exact)

    def errors(self, found: Heard, exact: Heard) -> dict[str, float]:
        """The error of each measure."""
        return {m: self._error(m, found, exact) for m in self.measures}

    def _error(self, measure: str, found: Heard, exact: Heard) -> float:
        if measure == OUTPUTS:
            return relative_error(found.output, exact.output)
        if measure == GRADIENTS:
            names = sorted(exact.gradients.keys() & found.gradients.keys())
            return relative_error(
                [found.gradients[n] for n in names],
                [exact.gradients[n] for n in names],
            )
        if measure == LOSS:
            assert found.loss is not None
            assert exact.loss is not None
            distance, size = abs(found.loss - exact.loss), abs(exact.loss)
            return distance / size if size else (math.inf if distance else 0.0)
        assert self.budget.metric is not None
        return metric_error(self.budget.metric, found.returned, exact.returned)


def metric_error(metric: Callable[..., Any], found: Any, exact: Any) -> float:
    """The error by a metric of the user's.

    Raises:
        OptionError: the metric fails, or returns no number.
    """
    try:
        with torch.no_grad():
            if takes_two(metric):
                return _number(metric(found, exact))
            ours, theirs = _numbers(metric(found)), _numbers(metric(exact))
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(
            f"Budget(metric=) failed on the model's output: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not bool(theirs.isfinite().all()):
        raise OptionError(
            "Budget(metric=) returns a NaN or an infinity for the output in fp32"
        )
    if ours.shape != theirs.shape:
        return math.inf
    moved = float((ours - theirs).square().mean().sqrt())
    return math.inf if math.isnan(moved) else moved


def takes_two(metric: Callable[..., Any]) -> bool:
    """Whether a metric takes the model's output and fp32's."""
    try:
        taken = inspect.signature(metric).parameters.values()
    except (TypeError, ValueError):
        return False
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in taken if p.kind in plain and p.default is p.empty]
    return len(needed) == 2


def _number(value: Any) -> float:
    numbers = _numbers(value)
    if numbers.numel() != 1:
        raise OptionError(
            "Budget(metric=) of two outputs must return one number, but it returns "
            f"{tuple(numbers.shape)}"
        )
    found = float(numbers)
    return math.inf if math.isnan(found) else abs(found)


def _numbers(value: Any) -> torch.Tensor:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor([float(value)], dtype=torch.float64, device="cpu")
    floats = floats_of(value)
    if not floats:
        raise OptionError(
            "Budget(metric=) must return a number or a float tensor, but it returns "
            f"{class_name(value)}"
        )
    return torch.cat([t.detach().double().flatten() for t in floats])
