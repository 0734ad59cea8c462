"""LBFGS, which evaluates the loss many times inside one step.

Its line search moves the weights before it knows where to, so an overflow is met there
and then: the loss is evaluated again at a lower scale, with the same result as a clean
run's.  Where no lower scale helps, weights and state are put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoamp.errors import LossScaleError
from autoamp.loss_scale import DynamicLossScale
from autoamp.optimizer.optimizers import closure_of
from autoamp.optimizer.snapshot import Hopeless, Snapshot
from autoamp.optimizer.step import OptimizerBoundary, Step


def step(
    boundary: OptimizerBoundary,
    inner: Step,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One step, or nothing: see `OptimizerBoundary.step`."""
    closure = closure_of(args, kwargs)
    if closure is None or boundary.leaves_to_scaler():
        return inner(*args, **kwargs)
    before = Snapshot(boundary)
    try:
        result = inner(_guarded(boundary, closure))
    except Hopeless as overflow:
        before.restore()
        boundary.finish(skipped=True)
        return overflow.args[0]
    except LossScaleError:
        before.restore()
        raise
    boundary.finish()
    return result


def first_step(
    boundary: OptimizerBoundary, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments for a step that has begun already; it cannot be undone any more.

    An overflow that no lower scale takes away is an error there.
    """
    closure = closure_of(args[1:], kwargs)
    if closure is None:
        return None
    before = Snapshot(boundary)
    guarded = _guarded(boundary, closure)

    def closure_or_error() -> Any:
        try:
            return guarded()
        except Hopeless:
            before.restore()
            raise LossScaleError(
                "gradients overflow at every loss scale in the first step of an LBFGS; "
                "nothing was written. Name the optimizer, autoamp.convert(model, "
                "optimizer), to have such a step skipped"
            ) from None
        except LossScaleError:
            before.restore()
            raise

    return (args[0], closure_or_error), {}


def _guarded(
    boundary: OptimizerBoundary, closure: Callable[[], Any]
) -> Callable[[], Any]:
    """`closure`, evaluated until its gradients are finite."""

    def evaluate() -> Any:
        while True:
            with torch.enable_grad():
                loss = closure()
            if not bool(boundary.judge(retries=True)):
                return loss
            scales = boundary.loss_scales
            if not all(isinstance(s, DynamicLossScale) for s in scales) or not scales:
                raise Hopeless(loss)

    return evaluate
