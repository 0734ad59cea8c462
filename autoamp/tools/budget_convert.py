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

from autoamp.dtypes import short_name
from autoamp.errors import (
    AutoampError,
    BudgetError,
    OptionError,
    UnsupportedModelError,
)
from autoamp.messages import op_title, printable_line, told
from autoamp.passes.decide.assign import Chosen, OpKey
from autoamp.passes.decide.policies import POLICIES, project
from autoamp.passes.record import Prepared
from autoamp.report.frontier import Check, Frontier, Point
from autoamp.runtime.eligible import choose_precision
from autoamp.runtime.examine import (
    Examiner,
    checked_model,
    examined,
    on_the_models_device,
)
from autoamp.runtime.stand_in import Call, Heard, floats_of, own_loss
from autoamp.tools.budget import (
    GRADIENTS,
    LOSS,
    METRIC,
    OUTPUTS,
    Budget,
    budget_of,
    errors_of,
    parsed,
    takes_two,
)
from autoamp.tools.budget_errors import Calibration, Squares
from autoamp.tools.budget_search import PINS, Found, Labels, Scene
from autoamp.training.options import Options

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
    chosen = _chosen(model, options, low, given, batches)
    return dataclasses.replace(options, chosen=chosen)


def _chosen(
    model: nn.Module,
    options: Options,
    low: torch.dtype,
    given: Any,
    calibrate_on: Iterable[Any],
) -> Chosen:
    """The placement of least time within a budget; see `autoamp.convert`.

    The last of several batches is not learned from.
    """
    begun = time.perf_counter()
    batches = [
        on_the_models_device(model, _call_of(each))
        for each in islice(calibrate_on, _BATCHES)
    ]
    if not batches:
        raise OptionError("calibrate_on= holds no batch")
    with examined(model, options, low) as (twin, engine):
        bench = _captured(twin, engine, batches, given)
        chosen, frontier = _Study(model, bench, batches, given).choose()
    seconds = time.perf_counter() - begun
    frontier = dataclasses.replace(frontier, seconds=seconds)
    return dataclasses.replace(chosen, frontier=frontier)


def _call_of(batch: Any) -> Call:
    """A batch of `calibrate_on`, as the arguments of one call."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, list):
        batch = tuple(batch)
    if not isinstance(batch, tuple):
        return (batch,), {}
    if len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict):
        return batch
    return batch, {}


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
    found = bench.exact()
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
    """The way from a budget to a placement, on one model and its batches.

    Attributes:
        exact: the call in fp32 on each batch; None where it is computed again.
        autocast: the errors under `torch.autocast` on each batch.
        step_seconds: the time of a call in fp32.
        limits: the largest error of each measure.
        is_predicted: whether the errors of a placement are predicted; for a metric
            without a gradient the ops are ranked by what they do to the outputs.
    """

    def __init__(
        self, model: nn.Module, bench: Calibration, batches: Sequence[Call], given: Any
    ) -> None:
        self.model, self.bench, self.batches = model, bench, batches
        self.graphs = self._runs()
        self.budget = _budget(given, bench)
        self.exact: list[Heard | None] = []
        self.autocast: list[dict[str, float]] = []
        self.step_seconds = math.inf
        self._look_at_fp32()
        self.limits = self._limits()
        metric = self.budget.metric
        self.is_predicted = metric is None or self._is_smooth(metric)

    def choose(self) -> tuple[Chosen, Frontier]:
        """The placement, and the frontier that it was chosen from."""
        begun = time.perf_counter()
        learned = self.batches[:-1] or self.batches
        found = self._learn(learned)
        scene, points = self._placements(found)
        spent = time.perf_counter() - begun
        under = scene
        if points[-1].fits(self.limits, _ROOM) and self._measured(None)[0] <= _ROOM:
            scene, points = self._placements(found, below_ceiling=True)
        at, checks, tried = self._within(scene, points)
        chosen = dataclasses.replace(
            scene.chosen(points[at].labels),
            reasons=_reasons(scene, points[at], self.limits),
        )
        return chosen, Frontier(
            budget=str(self.budget),
            precision=short_name(self.bench.engine.record.low),
            limits=self.limits,
            points=[_point(each) for each in points],
            marks=_marks(scene, under),
            chosen=at,
            checks=checks,
            below_ceiling=_below(scene, points[at].labels),
            tried=tried,
            steps=spent / len(learned) / self.step_seconds,
        )

    def _placements(
        self, found: Mapping[str, Squares], *, below_ceiling: bool = False
    ) -> tuple[Scene, list[Found]]:
        """The graphs with prices of error, and the placements of their frontier."""
        records = [(p.rewritten, n) for p, n in self.graphs.items() if p.rewritten]
        options = self.bench.engine.options
        scene = Scene(records, found, options, below_ceiling=below_ceiling)
        aims = dict(self.limits)
        if not self.is_predicted:
            del aims[METRIC]
            most = scene.squares(scene.everything).get(OUTPUTS, 0.0)
            unit = math.sqrt(most) if 0.0 < most < math.inf else 1.0
            aims[OUTPUTS] = min(unit, aims.get(OUTPUTS, unit))
        return scene, scene.frontier(aims)

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
            begun = time.perf_counter()
            exact = self.bench.exact()
            self.step_seconds = min(self.step_seconds, time.perf_counter() - begun)
            if GRADIENTS not in self.budget.limits:
                exact.gradients.clear()
            held = sum(g.nbytes for g in exact.gradients.values()) * len(self.batches)
            self.exact.append(exact if held <= _HELD or not self.exact else None)
            self.bench.find_scale(self.bench.placed)
            theirs = self.bench.under_autocast(self.model)
            self.autocast.append(
                errors_of(self.budget, theirs, exact) if theirs is not None else {}
            )

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
        again = self._errors(0, self.bench.exact)
        for measure, limit in limits.items():
            if not again[measure] <= limit:
                raise _unmet([Check(0, False, {measure: again[measure]}, {})], limits)
        return limits

    def _learn(self, learned: Sequence[Call]) -> dict[str, Squares]:
        """The squares of each measure, averaged over the batches learned from."""
        low, metric = self.bench.engine.record.low, self.budget.metric
        found = {measure: Squares(low, len(learned)) for measure in self.limits}
        if not self.is_predicted:
            found.setdefault(OUTPUTS, Squares(low, len(learned)))
        for number, call in enumerate(told(learned, "measuring roundings")):
            self.bench.call = call
            try:
                self.bench.learn(found, metric if self.is_predicted else None, number)
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
        assert self.exact[0] is not None
        outputs = pytree.tree_map_only(Tensor, _with_gradient, self.exact[0].returned)
        with torch.enable_grad():
            return any(t.requires_grad for t in floats_of(metric(outputs)))

    def _within(
        self, scene: Scene, points: list[Found]
    ) -> tuple[int, list[Check], int]:
        """The fastest placement whose measured errors are within the limits.

        The placements are bisected, from the one whose predicted errors fit; those
        between the last two, which are added to `points`, are bisected as well.

        Returns:
            Its place among the points, its measured errors, and how many placements
            were measured.
        """
        best, best_checks, tried = 0, list[Check](), 0
        too_fast = len(points)
        at, is_fine = self._likely(points, best, too_fast), False
        while tried < _TRIES:
            if not best < at < too_fast:
                if is_fine or too_fast == len(points):
                    break
                more, is_fine = scene.between(points[best], points[too_fast]), True
                points[too_fast:too_fast] = more
                too_fast += len(more)
                at = self._likely(points, best, too_fast)
                continue
            worst, checks = self._measured(scene.chosen(points[at].labels))
            tried += 1
            if worst > _MARGIN:
                too_fast = at
            else:
                best, best_checks = at, checks
                if worst > _ROOM:
                    break
            at = (best + too_fast) // 2
        if not best:  # the most exact placement
            worst, best_checks = self._measured(scene.chosen(points[0].labels))
            if not worst <= 1.0:
                raise _unmet(best_checks, self.limits)
        return best, best_checks, tried

    def _likely(self, points: Sequence[Found], best: int, too_fast: int) -> int:
        """The place between two at which the limits are likely to be."""
        if not self.is_predicted:
            return (best + too_fast) // 2
        fits = [points[at].fits(self.limits, _MARGIN) for at in range(best, too_fast)]
        return best + max(1, sum(fits) - 1)

    def _measured(self, chosen: Chosen | None) -> tuple[float, list[Check]]:
        """The largest measured share of a limit, and the errors batch by batch."""
        checks = self._checks(chosen)
        return _share(checks, self.limits), checks

    def _checks(self, chosen: Chosen | None) -> list[Check]:
        """The measured errors of a placement on every batch."""
        last = len(self.batches) - 1
        return [
            Check(
                batch=number,
                held_out=number == last > 0,
                errors=self._errors(number, lambda: self.bench.placed(chosen)),
                autocast=theirs,
            )
            for number, theirs in enumerate(self.autocast)
        ]

    def _errors(self, number: int, call: Callable[[], Heard]) -> dict[str, float]:
        """The errors of a call on one batch."""
        self.bench.call = self.batches[number]
        exact = self.exact[number] or self.bench.exact()
        return errors_of(self.budget, call(), exact)


def _with_gradient(value: Tensor) -> Tensor:
    value = value.detach()
    return value.requires_grad_() if value.is_floating_point() else value


def _unmet(checks: Sequence[Check], limits: Mapping[str, float]) -> BudgetError:
    """The error of a budget that fp32 does not meet."""
    shares = {
        (check.batch, measure, error): _share([check], {measure: limits[measure]})
        for check in checks
        for measure, error in check.errors.items()
    }
    batch, measure, error = max(shares, key=lambda each: shares[each])
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
    errors = {m: math.sqrt(s) for m, s in found.squares.items()}
    return Point(found.nanoseconds, errors, sum(map(len, found.labels.values())), name)


def _marks(scene: Scene, under: Scene) -> list[Point]:
    """The placements to compare with; `under` is the scene with the ceiling."""
    promoted = {
        p.name: project(p.problem, POLICIES["promote"](p.record.classified))
        for p in under.parts
    }
    return [
        _point(scene.placement(scene.nothing), "fp32"),
        _point(under.placement(promoted), "torch.autocast"),
        _point(scene.placement(scene.everything), "all low"),
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
    scene: Scene, found: Found, limits: Mapping[str, float]
) -> dict[OpKey, str]:
    """Why each free op is low or fp32, with what the other precision would do."""
    reasons: dict[OpKey, str] = {}
    for part in scene.parts:
        low = found.labels[part.name]
        now = _used(part.squares(low), limits)
        for name, key in part.keys.items():
            pin = part.problem.at_sink.get(name)
            if pin in PINS:
                reasons[key] = pin
            if pin is not None or name not in part.problem.unary:
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
