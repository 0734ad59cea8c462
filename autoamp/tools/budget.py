"""`Budget`: the error that a user allows, in units that a user has."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoamp.errors import OptionError
from autoamp.messages import class_name
from autoamp.runtime.stand_in import Heard, floats_of, relative_error

Limit = float | str

LOSS, OUTPUTS, GRADIENTS, METRIC = "loss", "outputs", "gradients", "metric"

_PERCENT = re.compile(r"\s*([-+.\deE]+)\s*%\s*")
_AUTOCAST = re.compile(r"\s*(?:([-+.\deE]+)\s*(?:x|\*|times)?\s*)?autocast(?:'s)?\s*")


@dataclass(frozen=True)
class Budget:
    """The error that mixed precision may make, against the same model in fp32.

    A limit is a number (0.001), a percentage ("0.1%"), or a part of the error that
    `torch.autocast` makes on the same batches ("autocast", "0.3 autocast").

    Attributes:
        loss: the limit for the relative error of the loss.
        outputs: the limit for ||outputs - fp32's|| / ||fp32's||, over all float tensors
            of the output together.
        gradients: the same for the gradients of all parameters together.
        metric: a function of the model's output that gives a number or a tensor, such
            as log-probabilities.  What counts is the root mean square of its change, in
            its own units.  A function of two outputs, the model's and fp32's, gives the
            error itself, such as a divergence.
        at_most: the limit for `metric`: a number, or a part of autocast's.
        loss_fn: gives the loss from the output; by default the output's own `loss`.

    Raises:
        OptionError: a limit is no positive number, or none is given.

    Example:
        >>> autoamp.Budget(outputs="0.1%", gradients="0.5 autocast").limits
        {'outputs': '0.1%', 'gradients': '0.5 autocast'}
    """

    loss: Limit | None = None
    outputs: Limit | None = None
    gradients: Limit | None = None
    metric: Callable[..., Any] | None = None
    at_most: Limit | None = None
    loss_fn: Callable[[Any], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        for name, limit in self.limits.items():
            parsed(limit, "at_most" if name == METRIC else name)
        for name in ("metric", "loss_fn"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise OptionError(f"Budget({name}={given!r}) is not a function")
        if (self.metric is None) != (self.at_most is None):
            raise OptionError(
                "Budget(metric=) and Budget(at_most=) go together: the function, and "
                "the largest change of its result, as in "
                "Budget(metric=lambda out: out.logits, at_most=0.01)"
            )
        if not self.limits:
            raise OptionError(
                "Budget() has no limit; give loss=, outputs=, gradients= or metric= "
                'with at_most=, as in Budget(outputs="0.1%")'
            )

    @property
    def limits(self) -> Mapping[str, Limit]:
        """The limit of each measure that has one."""
        every = {
            LOSS: self.loss,
            OUTPUTS: self.outputs,
            GRADIENTS: self.gradients,
            METRIC: self.at_most,
        }
        return {name: limit for name, limit in every.items() if limit is not None}

    def __str__(self) -> str:
        said = [f"{name} {limit}" for name, limit in self.limits.items()]
        return ", ".join(said)


def budget_of(given: Any, *, has_loss: bool, trains: bool) -> Budget:
    """The budget that `convert(budget=)` is given.

    A bare limit is for the loss, or for the outputs where the model has no loss of its
    own.  A bare part of autocast's error is for the outputs, and in training for the
    gradients too, since autocast's error of one loss may be small by chance.

    Raises:
        OptionError: it is no budget.
    """
    if isinstance(given, Budget):
        return given
    _, of_autocast = parsed(given, "budget")
    if of_autocast:
        return Budget(outputs=given, gradients=given if trains else None)
    return Budget(loss=given) if has_loss and trains else Budget(outputs=given)


def parsed(limit: Any, name: str) -> tuple[float, bool]:
    """A limit as a number, and whether the number is a part of autocast's error.

    Raises:
        OptionError: it is not a positive number, or not understood.
    """
    of_autocast, number, factor = False, limit, 1.0
    if isinstance(limit, str):
        if found := _PERCENT.fullmatch(limit):
            number, factor = found[1], 0.01
        elif found := _AUTOCAST.fullmatch(limit):
            number, of_autocast = found[1] or "1", True
    try:
        if isinstance(number, bool):
            raise ValueError
        value = float(number) * factor
    except (TypeError, ValueError):
        raise OptionError(
            f"{name}={limit!r} is no limit for an error: give a number (0.001), a "
            'percentage ("0.1%") or a part of autocast\'s error ("0.3 autocast")'
        ) from None
    if not 0 < value < math.inf:
        raise OptionError(f"{name}={limit!r} is not a positive, finite error")
    return value, of_autocast


def errors_of(budget: Budget, found: Heard, exact: Heard) -> dict[str, float]:
    """The error of each measure that a budget limits.

    Raises:
        OptionError: the metric fails, or returns no number.
    """
    return {measure: _error(measure, budget, found, exact) for measure in budget.limits}


def _error(measure: str, budget: Budget, found: Heard, exact: Heard) -> float:
    if measure == OUTPUTS:
        return relative_error(found.output, exact.output)
    if measure == GRADIENTS:
        names = sorted(exact.gradients.keys() & found.gradients.keys())
        ours, theirs = found.gradients, exact.gradients
        return relative_error([ours[n] for n in names], [theirs[n] for n in names])
    if measure == LOSS:
        assert found.loss is not None
        assert exact.loss is not None
        distance, size = abs(found.loss - exact.loss), abs(exact.loss)
        return distance / size if size else (math.inf if distance else 0.0)
    assert budget.metric is not None
    return _metric_error(budget.metric, found.returned, exact.returned)


def _metric_error(metric: Callable[..., Any], found: Any, exact: Any) -> float:
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
