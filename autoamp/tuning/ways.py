"""The ways to run a model that `tune` times, each on a stand-in of the model.

A stand-in is a module of the same class that shares the model's modules and weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from autoamp.ask.examine import twin_of
from autoamp.ask.stand_in import Call, LossFn, copied, outcome_of
from autoamp.calibrate.clock import seconds_of, surely_less
from autoamp.capture.autocast import autocast_for, fp32_results
from autoamp.capture.engine import Engine
from autoamp.dtypes import UNSCALED
from autoamp.inspect.findings import layouts_text
from autoamp.kernels.rotary.function import rotary
from autoamp.kernels.table import CHANNELS_LAST, ROTARY
from autoamp.model.conversion import conversion_of
from autoamp.model.convert import convert_model, revert_model
from autoamp.model.reporting import report_of
from autoamp.options import Options
from autoamp.place.cost import PriceModel
from autoamp.weights.copies import before_write

FP32, AUTOCAST = "fp32", "torch.autocast"

BY_AUTOCAST = "autoamp.tune measured that this model is faster under torch.autocast"


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

    @property
    def median(self) -> float:
        """The median time of a call, in seconds."""
        return statistics.median(self.seconds)

    def surely_faster_than(self, other: Runner) -> bool:
        """Whether this way is faster in so many rounds that chance is unlikely."""
        return surely_less(self.seconds, other.seconds)

    def share_of(self, other: Runner) -> float:
        """The median over the rounds of this way's time over another's."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(mine / its for mine, its in pairs)

    @property
    def engine(self) -> Engine | None:
        """The engine of the stand-in's graphs; None where it is not converted."""
        state = conversion_of(self.twin)
        return state.engine if state is not None else None

    def kernels(self) -> list[str]:
        """The names of the kernels and layouts in its graphs, for `unfused=`."""
        if self.engine is None:
            return []
        report = report_of(self.engine.record)
        found = dict.fromkeys(row.kernel for row in report.ops if row.kernel)
        for gm in report.graphs:
            if gm.graph.find_nodes(op="call_function", target=rotary):
                found[ROTARY] = None
        if layouts_text(report.graphs):
            found[CHANNELS_LAST] = None
        return [*found]

    def close(self) -> None:
        """Takes the conversion of the stand-in away."""
        revert_model(self.twin)
