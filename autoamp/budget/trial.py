"""The true errors of placements, measured on whole calls."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from autoamp.ask.outcome import Heard, relative_error
from autoamp.ask.replan import before_rewrite
from autoamp.ask.stand_in import floats_of
from autoamp.budget.budget import GRADIENTS, LOSS, OUTPUTS, Budget
from autoamp.budget.calibrate import Calibration
from autoamp.errors import OptionError
from autoamp.node_by_node.held import Held
from autoamp.node_by_node.runner import Runner
from autoamp.pipeline.prepared import Prepared
from autoamp.place.assign import Chosen
from autoamp.printable import class_name


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
