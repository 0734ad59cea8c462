"""`tune`: places ops by measured prices, times whole calls, keeps the fastest way."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoamp.ask.examine import checked_model
from autoamp.ask.progress import told
from autoamp.ask.stand_in import Call, LossFn, copied, default_loss
from autoamp.calibrate.hardware import device_name
from autoamp.calibrate.store import Store
from autoamp.capture.record import Skipped
from autoamp.dtypes import needs_loss_scale
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.model.conversion import DECLINED, Conversion, conversion_of
from autoamp.model.eligible import (
    parameters_of,
    required_precision,
    unsupported,
)
from autoamp.model.kept import capture_now, left_as_it_is
from autoamp.options import Options
from autoamp.printable import class_name, printable_line
from autoamp.tuning.prices import MeasuredPrices
from autoamp.tuning.tuning import Timed, Tuning
from autoamp.tuning.ways import AUTOCAST, FP32, Runner, Way

PREDICTED, MEASURED = "autoamp, predicted prices", "autoamp, measured prices"

_BUDGET = 10.0
"""Seconds that the rounds may take; at least `_FEWEST` rounds are made."""

_FEWEST, _MOST = 5, 31
"""Bounds on the rounds: with fewer than five, the sign test can prove nothing."""

_WARM_UP = 2


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
    model = checked_model(model)
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
        ways=tuple(contest.result()),
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
    """The way of autocast, and why it cannot be kept, if it cannot."""
    why_not = ""
    if needs_loss_scale(low) and model.training:
        why_not = "nothing would scale its loss"
    elif options.strict:
        why_not = "strict=True requires rewritten graphs"
    return Way(AUTOCAST, options, by_autocast=True, low=low, why_not=why_not)


def _without(kernel: str, way: Way) -> Way:
    """The same way without one kernel."""
    assert way.options is not None
    unfused = (*way.options.kernels_off, kernel)
    name = f"{way.name}, without {kernel}"
    return replace(way, name=name, options=way.options.replace(unfused=unfused))


class _Contest(ExitStack):
    """Times the ways to run one model, all in turn."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Call,
        loss_fn: LossFn,
    ) -> None:
        super().__init__()
        self.model, self.inputs, self.loss_fn = model, inputs, loss_fn
        self.runners: list[Runner] = []
        self.failed: dict[str, str] = {}
        self.order = random.Random(0)

    def enter(self, way: Way) -> Runner:
        """Adds a way to the contest; a way in which the model fails is only noted.

        Raises:
            Exception: the model fails in fp32.
        """
        runner = Runner(way, self.model, self.inputs, self.loss_fn)
        self.callback(runner.close)
        try:
            for _ in range(_WARM_UP):
                runner.run()
        except Exception as error:
            if way.options is None:
                raise
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            self.failed[way.name] = printable_line(problem)
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
        fastest = min(able, key=lambda runner: runner.share_of(self.runners[0]))
        equal = [r for r in able if not fastest.surely_faster_than(r)]
        return min(equal, key=lambda runner: runner.engine is None).way

    def result(self) -> Sequence[Timed]:
        """The times of all ways; a way that failed has its error instead."""
        fp32 = self.runners[0]
        found = [
            Timed(
                r.way.name,
                r.median,
                r.share_of(fp32),
                r.way.why_not,
                tuple(r.seconds),
            )
            for r in self.runners
        ]
        return found + [Timed(n, None, None, why) for n, why in self.failed.items()]
