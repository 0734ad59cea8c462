"""`tune`: places ops by measured prices, times whole calls, keeps the fastest way.

Each way to run the model is timed on a stand-in: a module of the same class that shares
the model's modules and weights.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoamp.dtypes import UNSCALED, needs_loss_scale, short_name
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.messages import FULL_WIDTH, class_name, printable_line, told
from autoamp.passes.decide.cost import PriceModel
from autoamp.passes.functions.rotary import rotary
from autoamp.passes.kernels.table import CHANNELS_LAST, ROTARY
from autoamp.passes.speeds.clock import device_name, seconds_of, surely_less
from autoamp.passes.speeds.prices import MeasuredPrices
from autoamp.passes.speeds.store import Store
from autoamp.printed import Line, Printed, Table
from autoamp.report.findings import layouts_text
from autoamp.report.reporting import report_of
from autoamp.runtime.conversion import DECLINED, Conversion, conversion_of
from autoamp.runtime.convert import convert_model, revert_model
from autoamp.runtime.eligible import parameters_of, required_precision, unsupported
from autoamp.runtime.examine import checked_model, twin_of
from autoamp.runtime.graph import autocast_for, fp32_results
from autoamp.runtime.kept import capture_now, left_as_it_is
from autoamp.runtime.record import Skipped
from autoamp.runtime.stand_in import Call, LossFn, copied, default_loss, outcome_of
from autoamp.tools.named import given
from autoamp.training.options import Options
from autoamp.training.weight_copies import before_write

FP32, AUTOCAST = "fp32", "torch.autocast"
PREDICTED, MEASURED = "autoamp, predicted prices", "autoamp, measured prices"

BY_AUTOCAST = "autoamp.tune measured that this model is faster under torch.autocast"

_BUDGET = 10.0
"""Seconds that the rounds may take; at least `_FEWEST` rounds are made."""

_FEWEST, _MOST = 5, 31
"""Bounds on the rounds: with fewer than five, the sign test can prove nothing."""

_WARM_UP = 2


@dataclass(frozen=True)
class Way:
    """One way to run a model.

    Attributes:
        name: the way, for the report.
        options: the options of the conversion; None if the model is not converted.
        price: the prices for the placement; None for the roofline's prices.
        by_autocast: whether calls run under `torch.autocast`.
        low: the compute dtype of autocast.
        why_not: why the way cannot be kept; "" if it can.
    """

    name: str
    options: Options | None = None
    price: PriceModel | None = None
    by_autocast: bool = False
    low: torch.dtype = UNSCALED
    why_not: str = ""

    def set_up(self, model: nn.Module) -> None:
        """Makes `model` run this way."""
        if self.options is None:
            revert_model(model)
            return
        convert_model(model, self.options, price=self.price)
        state = conversion_of(model)
        assert state is not None
        # A model that cannot be converted has no entry, and its report says why.
        if state.call is not None and self.by_autocast:
            state.call.leave_to_autocast(BY_AUTOCAST)


@dataclass(frozen=True)
class Timed:
    """The time of one way to run a model.

    Attributes:
        name: the way.
        seconds: the median time of a call, with its backward in training mode; None if
            the model fails in this way.
        share: the median over all rounds of the way's time over fp32's time.
        note: why the way could not be kept; "" if it could.
        times: the way's time in each round.
    """

    name: str
    seconds: float | None
    share: float | None
    note: str = ""
    times: tuple[float, ...] = ()

    def scattered(self) -> str:
        """The name of the way with its median, least and largest time."""
        assert self.seconds is not None
        said = f"{self.name} ({_milliseconds(self.seconds)} ms"
        if not self.times:
            return f"{said})"
        least, most = map(_milliseconds, (min(self.times), max(self.times)))
        return f"{said}, from {least} to {most})"


@dataclass(frozen=True, repr=False)
class Tuning(Printed):
    """The measurements of `autoamp.tune` and the way it kept; `print(tuning)` shows it.

    Attributes:
        label: the model's class name.
        precision: the compute dtype.
        device: the hardware.
        training: whether each call was timed with its backward.
        chosen: the name of the way that was kept.
        ways: all ways, fp32 first.
        measured: how many times of ops and casts were measured.
        remembered: how many times of ops and casts an earlier tuning had stored.
        seconds: how long the tuning took.
    """

    columns = FULL_WIDTH

    label: str
    precision: torch.dtype
    device: str
    training: bool
    chosen: str
    ways: tuple[Timed, ...]
    measured: int
    remembered: int
    seconds: float

    @property
    def share(self) -> float:
        """The time of the way that was kept, over fp32's time."""
        return self._kept.share or 1.0

    @property
    def _kept(self) -> Timed:
        return next(w for w in self.ways if w.name == self.chosen)

    def sentence(self) -> str:
        """Says which way was kept, and how its time compares."""
        others = [w for w in self.ways if w.share is not None and w.name != self.chosen]
        shares = [f"{self.share / w.share:.2f} of {w.name}" for w in others if w.share]
        kept = self._kept
        rivals = [
            w for w in others if not w.note and not surely_less(kept.times, w.times)
        ]
        said = f"kept {self.chosen}: on this call "
        if rivals:
            times = " or ".join(w.scattered() for w in (kept, *rivals))
            said += (
                f"{len(kept.times)} rounds could not tell which is faster, {times}. "
                "If the times lie far apart, another program was running: tune again "
                "when no other program runs"
            )
        elif any(w.note and w.share and w.share < self.share for w in others):
            said += "no way that can be kept is faster"
        else:
            said += "no way is faster"
        return f"{said}. Its time is {', '.join(shares)}"

    def __repr__(self) -> str:
        return (
            f"<autoamp.Tuning of {self.label}: {self.chosen}, {self.share:.2f} of the "
            "time of fp32>"
        )

    def parts(self) -> Iterator[Line | Table]:
        """The way that was kept, the times of all ways, and the small print."""
        low = short_name(self.precision)
        what = "a call and its backward" if self.training else "a call"
        yield Line(
            f"autoamp tune: {self.label}, {low}, {what} on {self.device}", "head"
        )
        yield Line("")
        yield Table(["way", "ms", "of fp32"], [*map(self._row, self.ways)])
        for way in self.ways:
            if way.note:
                yield Line(f"{way.name}: {way.note}")
        yield Line("")
        sentence = self.sentence()
        yield Line(f"{sentence[0].upper()}{sentence[1:]}.")
        yield Line(
            f"Times of ops and casts: {self.measured:,} measured, {self.remembered:,} "
            f"known from before. {self.seconds:.0f} s in all."
        )

    def _row(self, way: Timed) -> list[str]:
        kept = ", kept" if way.name == self.chosen else ""
        if way.seconds is None:
            return [way.name, "fails", ""]
        return [way.name + kept, _milliseconds(way.seconds), f"{way.share:.2f}"]


def _milliseconds(seconds: float) -> str:
    """Three digits, or all digits before the point: 0.0123, 26.3, 2630."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def tune_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    loss_fn: LossFn | None = None,
) -> Tuning:
    """Converts `model` in the fastest way; see `autoamp.tune`.

    Raises:
        UnsupportedModelError: the model cannot be captured, or has nothing to convert.
        OptionError: an option fixes the choice already, or the loss is no scalar.
    """
    begun = time.perf_counter()
    made = given("tune", model, args, kwargs)
    model, args, kwargs = checked_model(made.model), made.args, made.kwargs
    reason = unsupported(model)
    if reason is not None:
        raise UnsupportedModelError(reason)
    _check(options)
    low, forced = required_precision(model, options, even_at_a_loss=True)
    device = next((p.device for p in parameters_of(model)), torch.device("cpu"))
    where = device_name(device)
    prices = MeasuredPrices(low, Store(f"{where}, torch {torch.__version__}"))
    inputs = args, dict(kwargs)
    contest = _Contest(model, inputs, loss_fn or default_loss)
    with contest:
        with left_as_it_is(model, weights=True):
            ways = [Way(FP32), _autocast(model, forced, low)]
            if forced is options:
                ways.append(Way(PREDICTED, options))
            measured = Way(MEASURED, forced, prices)
            ways.append(measured)
            for way in told(ways, "setting up the ways to run the model"):
                runner = contest.enter(way)
                if way is measured:
                    ways += [_without(kernel, way) for kernel in runner.kernels()]
            contest.hold()
            chosen = contest.kept()
        prices.measures = False  # a later capture must not take seconds
        for way in told([chosen], f"setting up {chosen.name}"):
            way.set_up(model)
            if conversion_of(model) is not None and not way.by_autocast:
                with left_as_it_is(model, weights=True):
                    capture_now(model, *copied(inputs))
    found = Tuning(
        label=class_name(model),
        precision=low,
        device=where,
        training=model.training,
        chosen=chosen.name,
        ways=(*(r.timed(contest.fp32) for r in contest.runners), *contest.failed),
        measured=prices.measured,
        remembered=prices.remembered,
        seconds=time.perf_counter() - begun,
    )
    if chosen.options is None:
        DECLINED[model] = Conversion(declined=[Skipped(found.label, found.sentence())])
    return found


def _check(options: Options) -> None:
    """Refuses options under which times of torch's kernels decide nothing.

    Raises:
        OptionError: such an option is given.
    """
    wanted = {"backend": "eager", "placement": "optimal", "objective": "time"}
    for name, value in wanted.items():
        given = getattr(options, name)
        if given != value:
            raise OptionError(
                f"tune() chooses by the times of torch's own kernels, which do not "
                f"count under {name}={given!r}: leave {name} at {value!r}, or use "
                "convert()"
            )


def _autocast(model: nn.Module, options: Options, low: torch.dtype) -> Way:
    why_not = ""
    if needs_loss_scale(low) and model.training:
        why_not = "nothing would scale its loss"
    elif options.strict:
        why_not = "strict=True requires rewritten graphs"
    return Way(AUTOCAST, options, by_autocast=True, low=low, why_not=why_not)


def _without(kernel: str, way: Way) -> Way:
    """The same way without one kernel."""
    assert way.options is not None
    name = f"{way.name}, without {kernel}"
    return replace(way, name=name, options=way.options.without_kernels(kernel))


def _under_autocast(
    model: nn.Module, low: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    with autocast_for(model, args, low, cached=True):
        result = model(*args, **kwargs)
    return fp32_results(result, low)


@dataclass(eq=False)
class Runner:
    """Calls a stand-in that runs one way, again and again on the same inputs.

    Attributes:
        seconds: the time of each timed call so far, with its backward.
    """

    way: Way
    model: nn.Module
    inputs: Call
    loss_fn: LossFn
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.twin = twin_of(self.model)
        self.called: Callable[..., Any] = self.twin
        if self.way.by_autocast:
            self.called = partial(_under_autocast, self.twin, self.way.low)
        else:
            self.way.set_up(self.twin)
        parameters = [*self.model.parameters()]
        self.trained = [p for p in parameters if p.requires_grad]
        self.device = parameters[0].device if parameters else torch.device("cpu")

    def run(self) -> float:
        """The seconds of one call and, in training mode, its backward.

        In training mode the weights count as written to, as after a step.
        """
        inputs, trains = copied(self.inputs), self.model.training
        if trains:
            before_write(self.trained)

        def call() -> None:
            outcome_of(self.called, inputs, self.loss_fn, self.trained, trains=trains)

        return seconds_of(call, self.device)

    def share_of(self, other: Runner) -> float:
        """The median over the rounds of this way's time over another's."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(mine / its for mine, its in pairs)

    def timed(self, fp32: Runner) -> Timed:
        """The times of this way beside those of fp32."""
        median, times = statistics.median(self.seconds), tuple(self.seconds)
        share = self.share_of(fp32)
        return Timed(self.way.name, median, share, self.way.why_not, times)

    def kernels(self) -> list[str]:
        """The names of the kernels and layouts in its graphs, for `fuse=`."""
        state = conversion_of(self.twin)
        if state is None or state.engine is None:
            return []
        report = report_of(state.engine.record)
        found = dict.fromkeys(row.kernel for row in report.ops if row.kernel)
        for gm in report.graphs:
            if gm.graph.find_nodes(op="call_function", target=rotary):
                found[ROTARY] = None
        if layouts_text(report.graphs):
            found[CHANNELS_LAST] = None
        return [*found]


class _Contest(ExitStack):
    """Times the ways to run one model, all in turn."""

    def __init__(self, model: nn.Module, inputs: Call, loss_fn: LossFn) -> None:
        super().__init__()
        self.model, self.inputs, self.loss_fn = model, inputs, loss_fn
        self.runners: list[Runner] = []
        self.failed: list[Timed] = []
        self.order = random.Random(0)

    @property
    def fp32(self) -> Runner:
        """The first way."""
        return self.runners[0]

    def enter(self, way: Way) -> Runner:
        """Adds a way to the contest; a way in which the model fails is only noted.

        Raises:
            Exception: the model fails in fp32.
        """
        runner = Runner(way, self.model, self.inputs, self.loss_fn)
        self.callback(revert_model, runner.twin)
        try:
            for _ in range(_WARM_UP):
                runner.run()
        except Exception as error:
            if way.options is None:
                raise
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            self.failed.append(Timed(way.name, None, None, printable_line(problem)))
        else:
            self.runners.append(runner)
        return runner

    def hold(self) -> None:
        """Runs all ways, in another order in each round, and notes their times."""
        first = told(self.runners, "timing a first call of each way")
        once = sum(runner.run() for runner in first)
        rounds = max(_FEWEST, min(_MOST, round(_BUDGET / once)))
        for _ in told(range(rounds), "timing whole calls"):
            for runner in self.order.sample(self.runners, len(self.runners)):
                runner.seconds.append(runner.run())

    def kept(self) -> Way:
        """The way to keep: the fastest, or a way that is not surely slower.

        Rewritten graphs sum gradients of weights in fp32 and have a report, so they are
        preferred to autocast if neither is surely faster.
        """
        able = [runner for runner in self.runners if not runner.way.why_not]
        fastest = min(able, key=lambda runner: runner.share_of(self.fp32))
        equal = [r for r in able if not surely_less(fastest.seconds, r.seconds)]

        def runs_our_graphs(runner: Runner) -> bool:
            state = conversion_of(runner.twin)
            return state is not None and state.engine is not None

        return max(equal, key=runs_our_graphs).way
