"""`convert(budget=...)`: learns, places, measures, and places again until it fits."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.ask.examine import Examiner, checked_model, examined, on_the_models_device
from autoamp.ask.progress import told
from autoamp.ask.stand_in import Call, Heard, floats_of, own_loss
from autoamp.budget.budget import (
    GRADIENTS,
    LOSS,
    METRIC,
    OUTPUTS,
    Budget,
    budget_of,
    parsed,
)
from autoamp.budget.search import PINS, Found, Labels, Scene, Search, scene_of
from autoamp.budget.sensitivity import Rounding, Squares
from autoamp.budget.trial import Calibration, Judge, batches_of, takes_two
from autoamp.dtypes import short_name
from autoamp.errors import (
    AutoampError,
    BudgetError,
    OptionError,
    UnsupportedModelError,
)
from autoamp.inspect.text import op_title
from autoamp.model.eligible import choose_precision
from autoamp.options import Options
from autoamp.pipeline.prepared import Prepared
from autoamp.place.assign import Chosen, OpKey
from autoamp.place.frontier import Check, Frontier, Point
from autoamp.place.policies import POLICIES, project
from autoamp.printable import printable_line

LOW = "the budget for error has room for its rounding"
HIGH = "the budget for error leaves it fp32"

_BATCHES = 16
"""The most batches that are taken of `calibrate_on`, which may be endless."""

_HELD = 2**30
"""Gradients in fp32 are held for all batches up to this many bytes; above, each is
computed again where it is needed."""

_TRIES = 8
"""The most placements that are measured."""

_MARGIN = 0.9
"""The part of the budget that is aimed at: another batch has another error."""

_ROOM = 0.8
"""A placement whose true error is below this part of the budget may give way to a
faster one."""


def with_budget(
    model: Any, options: Options, given: Any, batches: Iterable[Any] | None
) -> Options:
    """The options, with the placement of least time within a budget.

    They stay as they are where the model is not converted at all.

    Raises:
        OptionError: the budget, a batch or an option beside them cannot be used.
        BudgetError: not even fp32 is within the budget.
    """
    if not isinstance(given, Budget):
        parsed(given, "budget")
    if batches is None:
        raise OptionError(
            "budget= needs data to measure errors on: calibrate_on=[batch, ...], or "
            "example_inputs="
        )
    if isinstance(batches, torch.Tensor | Mapping | str):
        raise OptionError(
            "calibrate_on= is a list of batches; for one batch write "
            "calibrate_on=[batch]"
        )
    for name, value in (("placement", "optimal"), ("objective", "time")):
        if getattr(options, name) != value:
            raise OptionError(
                f"budget= chooses the placement of least time, so {name}="
                f"{getattr(options, name)!r} cannot be given beside it"
            )
    model = checked_model(model)
    low, _ = choose_precision(model, options)
    if low is None:
        return options
    chosen = chosen_for(model, options, low, given, batches)
    return dataclasses.replace(options, chosen=chosen)


def chosen_for(
    model: nn.Module,
    options: Options,
    low: torch.dtype,
    given: Any,
    calibrate_on: Iterable[Any],
) -> Chosen:
    """The placement of least time within a budget; see `autoamp.convert`.

    Args:
        low: the compute dtype.
        given: the budget, as `convert` is given it.
        calibrate_on: the batches to measure errors on; the last of several is not
            learned from.

    Raises:
        OptionError: the budget or a batch cannot be used.
        BudgetError: not even fp32 is within the budget.
    """
    begun = time.perf_counter()
    model = checked_model(model)
    batches = [
        on_the_models_device(model, each)
        for each in batches_of(islice(calibrate_on, _BATCHES))
    ]
    if not batches:
        raise OptionError("calibrate_on= holds no batch")
    with examined(model, options, low) as (twin, engine):
        bench = _captured(twin, engine, batches, given)
        budget = _budget(given, bench)
        study = _Study(model, bench, batches, budget)
        chosen = study.choose()
    assert isinstance(chosen.frontier, Frontier)
    seconds = time.perf_counter() - begun
    frontier = dataclasses.replace(chosen.frontier, seconds=seconds)
    return dataclasses.replace(chosen, frontier=frontier)


def _captured(
    twin: nn.Module, engine: Examiner, batches: Sequence[Call], given: Any
) -> Calibration:
    """A stand-in that has been captured for every batch.

    Raises:
        OptionError: the model does not take a batch.
    """
    loss_fn = given.loss_fn if isinstance(given, Budget) else None
    bench = None
    for number, call in enumerate(told(batches, "capturing the model")):
        try:
            if bench is None:
                bench = Calibration(twin, engine, call, loss_fn, trains=twin.training)
            bench.call = call
            bench.counted()
        except AutoampError:
            raise
        except Exception as error:
            raise OptionError(
                f"calibrate_on[{number}] cannot be passed to the model: "
                f"{printable_line(f'{type(error).__name__}: {error}')}. A batch is a "
                "tensor, a tuple of arguments, or a dict of keyword arguments"
            ) from error
    assert bench is not None
    return bench


def _budget(given: Any, bench: Calibration) -> Budget:
    """The budget, with limits for measures that the model has.

    Raises:
        OptionError: a limit is for gradients or a loss, and the model does not train.
    """
    judge = Judge(bench, Budget(outputs=1.0), ())
    found = judge.exact()
    budget = budget_of(
        given, has_loss=own_loss(found.returned) is not None, trains=bench.trains
    )
    needs = [name for name in (LOSS, GRADIENTS) if name in budget.limits]
    if needs and not bench.trains:
        raise OptionError(
            f"Budget({needs[0]}=) needs a model in training mode; this model is in "
            "eval mode, so give outputs= or metric="
        )
    if OUTPUTS in budget.limits and not found.output:
        raise OptionError(
            "the model's output holds no float tensor, whose error could be limited; "
            "give loss= with loss_fn=, or metric="
        )
    if GRADIENTS in budget.limits and not found.gradients:
        raise OptionError("Budget(gradients=) needs a model with trainable parameters")
    return budget


class _Study:
    """The way from a budget to a placement, on one model and its batches."""

    def __init__(
        self,
        model: nn.Module,
        bench: Calibration,
        batches: Sequence[Call],
        budget: Budget,
    ) -> None:
        self.model, self.bench, self.batches = model, bench, batches
        self.budget, self.measures = budget, list(budget.limits)
        self.judge = Judge(bench, budget, self.measures)
        self.learned = batches[:-1] or batches
        self.exact: list[Heard | None] = []
        self.autocast: list[dict[str, float]] = []
        self.step_seconds = math.inf
        self.ranked_by_outputs = False

    def choose(self) -> Chosen:
        """The placement, with the frontier that it was chosen from."""
        graphs = self._runs()
        self._look_at_fp32()
        limits = self._limits()
        begun = time.perf_counter()
        found = self._learn()
        records = [(p.rewritten, n) for p, n in graphs.items() if p.rewritten]
        options = self.bench.engine.options
        scene = scene_of(records, found, options)
        search = Search(scene, self._aims(scene, limits))
        points = search.frontier()
        spent = time.perf_counter() - begun
        if points[-1].fits(limits, _ROOM) and self._holds(None, limits):
            below = scene_of(records, found, options, below_ceiling=True)
            search = Search(below, self._aims(below, limits))
            points = search.frontier()
        chosen, frontier = self._within(search, points, limits)
        frontier = dataclasses.replace(
            frontier,
            marks=_marks(search, scene),
            steps=spent / len(self.learned) / self.step_seconds,
        )
        return dataclasses.replace(chosen, frontier=frontier)

    def _aims(self, scene: Scene, limits: Mapping[str, float]) -> dict[str, float]:
        """The limits of the search; outputs stand for a metric without a gradient."""
        if not self.ranked_by_outputs:
            return dict(limits)
        most = scene.squares(scene.everything()).get(OUTPUTS, 0.0)
        unit = math.sqrt(most) if 0.0 < most < math.inf else 1.0
        kept = {m: limit for m, limit in limits.items() if m != METRIC}
        return {**kept, OUTPUTS: min(unit, kept.get(OUTPUTS, unit))}

    def _runs(self) -> Counter[Prepared]:
        """Each rewritten graph, and how often a call runs it on average."""
        total: Counter[Prepared] = Counter()
        for call in self.batches:
            self.bench.call = call
            total.update(self.bench.counted())
        return Counter({p: n / len(self.batches) for p, n in total.items()})

    def _look_at_fp32(self) -> None:
        """Calls the model in fp32 and under autocast, on each batch."""
        for call in told(self.batches, "calling the model in fp32"):
            self.bench.call = call
            exact, seconds = self._timed_exact()
            if GRADIENTS not in self.measures:
                exact.gradients.clear()
            held = sum(g.nbytes for g in exact.gradients.values()) * len(self.batches)
            self.exact.append(exact if held <= _HELD or not self.exact else None)
            self.step_seconds = min(self.step_seconds, seconds)
            self.bench.find_scale(lambda: self.judge.placed(None))
            self.autocast.append(self.judge.autocast(self.model, exact))

    def _exact(self, number: int) -> Heard:
        """The call in fp32 on one batch, which must be the batch that is set."""
        return self.exact[number] or self.judge.exact()

    def _timed_exact(self) -> tuple[Heard, float]:
        """A call in fp32, and its seconds."""
        begun = time.perf_counter()
        return self.judge.exact(), time.perf_counter() - begun

    def _limits(self) -> dict[str, float]:
        """The largest error of each measure.

        Raises:
            BudgetError: two calls in fp32 differ by more than a limit.
            OptionError: a limit is a part of autocast's error, which is not known.
        """
        limits = {}
        for measure, given in self.budget.limits.items():
            value, of_autocast = parsed(given, measure)
            if of_autocast:
                known = [e[measure] for e in self.autocast if measure in e]
                squares = [e**2 for e in known] or [0.0]
                theirs = math.sqrt(sum(squares) / len(squares))
                if not 0 < theirs < math.inf:
                    raise OptionError(
                        f"{measure}={given!r}: torch.autocast "
                        + ("makes no error" if known else "raises")
                        + " on this model, so give the limit as a number"
                    )
                value *= theirs
            limits[measure] = value
        self.bench.call = self.batches[0]
        again = self.judge.errors(self.judge.exact(), self._exact(0))
        for measure, limit in limits.items():
            if not again[measure] <= limit:
                raise _unmet([Check(0, False, {measure: again[measure]}, {})], limits)
        return limits

    def _learn(self) -> dict[str, Squares]:
        """The squares of each measure, averaged over the batches learned from."""
        found = {measure: Squares() for measure in self.measures}
        rounding = Rounding(self.bench.engine.record.low, found, len(self.learned))
        metric = self.budget.metric
        if metric is not None and not self._is_smooth(metric):
            # The ops are ranked by what they do to the outputs.
            found.setdefault(OUTPUTS, Squares())
            self.ranked_by_outputs, metric = True, None
        for number, call in enumerate(told(self.learned, "measuring roundings")):
            self.bench.call = call
            try:
                self.bench.learn(rounding, metric, seed=number)
            except RuntimeError as error:
                if isinstance(error, AutoampError):
                    raise
                problem = printable_line(f"{type(error).__name__}: {error}")
                raise UnsupportedModelError(
                    "budget= needs derivatives through the whole model, and torch "
                    f"cannot give them: {problem}"
                ) from error
        return found

    def _is_smooth(self, metric: Callable[..., Any]) -> bool:
        """Whether a metric of one output gives numbers with a gradient."""
        if takes_two(metric):
            return False
        outputs = pytree.tree_map_only(Tensor, _with_gradient, self._exact(0).returned)
        with torch.enable_grad():
            return any(t.requires_grad for t in floats_of(metric(outputs)))

    def _within(
        self, search: Search, points: Sequence[Found], limits: Mapping[str, float]
    ) -> tuple[Chosen, Frontier]:
        """The fastest placement whose measured errors are within the limits.

        The placements are bisected, from the one whose predicted errors fit.
        """
        best: tuple[int, list[Check]] = 0, []
        too_fast, tried = len(points), 0
        fitting = [i for i, each in enumerate(points) if each.fits(limits, _MARGIN)]
        at = max(fitting, default=0) or 1
        if self.ranked_by_outputs:  # no prediction
            at = too_fast // 2
        while tried < _TRIES and best[0] < at < too_fast:
            checks = self._checks(search.scene.chosen(points[at].labels))
            worst, tried = _share(checks, limits), tried + 1
            if worst > _MARGIN:
                too_fast = at
            else:
                best = (at, checks)
                if worst > _ROOM:
                    break
            at = (best[0] + too_fast) // 2
        if not best[1]:  # the most exact placement
            best = (0, self._checks(search.scene.chosen(points[0].labels)))
            if not _share(best[1], limits) <= 1.0:
                raise _unmet(best[1], limits)
        at, checks = best
        found = points[at]
        chosen = search.scene.chosen(found.labels)
        chosen = dataclasses.replace(chosen, reasons=_reasons(search, found, limits))
        frontier = Frontier(
            budget=str(self.budget),
            precision=short_name(self.bench.engine.record.low),
            limits=dict(limits),
            points=[_point(each) for each in points],
            marks=(),
            chosen=at,
            checks=checks,
            below_ceiling=_below(search.scene, found.labels),
            tried=tried,
        )
        return chosen, frontier

    def _holds(self, chosen: Chosen | None, limits: Mapping[str, float]) -> bool:
        """Whether the measured errors of a placement leave room below the limits."""
        return _share(self._checks(chosen), limits) <= _ROOM

    def _checks(self, chosen: Chosen | None) -> list[Check]:
        """The measured errors of a placement on every batch."""
        checks = []
        for number, call in enumerate(self.batches):
            self.bench.call = call
            errors = self.judge.errors(self.judge.placed(chosen), self._exact(number))
            held_out = len(self.batches) > 1 and number == len(self.batches) - 1
            checks.append(Check(number, held_out, errors, self.autocast[number]))
        return checks


def _with_gradient(value: Tensor) -> Tensor:
    value = value.detach()
    return value.requires_grad_() if value.is_floating_point() else value


def _unmet(checks: Sequence[Check], limits: Mapping[str, float]) -> BudgetError:
    """The error of a budget that fp32 does not meet."""
    shares = {
        (check.batch, measure, error): error / limits[measure]
        for check in checks
        for measure, error in check.errors.items()
    }
    batch, measure, error = max(
        shares, key=lambda key: math.inf if math.isnan(shares[key]) else shares[key]
    )
    return BudgetError(
        "the budget cannot be met even in fp32: two calls of the model in fp32 on "
        f"batch {batch} differ by {error:.2g} in {measure}, and the budget is "
        f"{limits[measure]:.2g}. The model draws numbers that torch does not, keeps a "
        "state, or makes NaN"
    )


def _share(checks: Sequence[Check], limits: Mapping[str, float]) -> float:
    """The largest measured error over its limit."""
    shares = [c.errors[m] / limit for c in checks for m, limit in limits.items()]
    return max(math.inf if math.isnan(s) else s for s in shares)


def _point(found: Found, name: str = "") -> Point:
    return Point(found.nanoseconds, found.errors(), found.count, name)


def _marks(search: Search, scene: Scene) -> list[Point]:
    """The placements to compare with."""
    promoted = {
        p.name: project(p.problem, POLICIES["promote"](p.record.classified))
        for p in scene.parts
    }
    under = Search(scene, {})
    return [
        _point(search.placement(search.scene.nothing), "fp32"),
        _point(under.placement(promoted), "torch.autocast"),
        _point(search.placement(search.scene.everything()), "all low"),
    ]


def _below(scene: Scene, labels: Labels) -> list[str]:
    """The ops that are low though type promotion leaves them fp32."""
    if not scene.below_ceiling:
        return []
    found = []
    for part in scene.parts:
        promoted = POLICIES["promote"](part.record.classified)
        for name in sorted(labels[part.name] - promoted):
            key = part.keys.get(name)
            if key is not None:
                found.append(f"{key.module}: {op_title(key.op)}")
    return found


def _reasons(
    search: Search, found: Found, limits: Mapping[str, float]
) -> dict[OpKey, str]:
    """Why each free op is low or fp32, with what the other precision would do."""
    reasons: dict[OpKey, str] = {}
    for part in search.scene.parts:
        low = found.labels[part.name]
        now = _used(part.squares(low), limits)
        for name, key in part.keys.items():
            if part.problem.at_sink.get(name) in PINS:
                reasons[key] = part.problem.at_sink[name]
            if name in part.problem.at_sink or name not in part.problem.unary:
                continue
            change = _used(part.squares(low ^ {name}), limits) - now
            reasons[key] = (
                f"{LOW} (uses {max(0.0, -change):.1%} of the squared error allowed)"
                if name in low
                else f"{HIGH} (low, it would use {max(0.0, change):.1%} of the squared "
                "error allowed)"
            )
    return reasons


def _used(squares: Mapping[str, float], limits: Mapping[str, float]) -> float:
    """The part of the squared error allowed that is used, by the tightest limit."""
    return max(squares.get(m, 0.0) / limit**2 for m, limit in limits.items())
