"""Steps of optimizers that are not torch's, and evaluate their closure themselves.

Torch's own evaluate it before anything else, so it can be evaluated before the step.
Others may read the gradients that are there and move the weights first, as SAM does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from autoamp.errors import LossScaleError
from autoamp.optimizer.optimizers import closure_of, params_of
from autoamp.optimizer.snapshot import Hopeless, Snapshot
from autoamp.optimizer.step import OptimizerBoundary, Step


def evaluates_first(optimizer: Optimizer) -> bool:
    """Whether its step is torch's: the closure is evaluated before anything else."""
    module = getattr(type(optimizer).step, "__module__", None) or ""
    return module.startswith("torch.optim")


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether there is anything a step could read before it evaluates its closure."""
    return any(p.grad is not None for p in params_of(optimizer))


def step(
    boundary: OptimizerBoundary,
    inner: Step,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One step with a closure, or nothing: see `OptimizerBoundary.step`.

    What was written before the closure was evaluated is put back; a copy is made for
    that in the first step, and later only where one was needed.
    """
    if boundary.leaves_to_scaler():
        return inner(*args, **kwargs)
    before = Snapshot(boundary) if boundary.writes_first else None
    guarded = _Guarded(boundary, closure_of(args, kwargs), before)
    args, kwargs = guarded.given(args, kwargs)
    try:
        result = inner(*args, **kwargs)
        if not guarded.called:
            guarded.judge(None)
    except Hopeless as overflow:
        if before is not None:
            before.restore()
        boundary.finish(skipped=True)
        return overflow.args[0]
    except LossScaleError:
        if before is not None:
            before.restore()
        raise
    boundary.writes_first = guarded.written
    boundary.finish()
    return result


def first_step(
    boundary: OptimizerBoundary, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a step that has begun already, as `lbfgs.first_step`."""
    before = Snapshot(boundary)
    guarded = _Guarded(boundary, closure_of(args[1:], kwargs), before, stop=False)
    rest, kwargs = guarded.given(args[1:], kwargs)
    return (args[0], *rest), kwargs


class _Guarded:
    """A closure whose gradients are judged as soon as it has been evaluated."""

    def __init__(
        self,
        boundary: OptimizerBoundary,
        closure: Callable[[], Any] | None,
        before: Snapshot | None,
        stop: bool = True,
    ) -> None:
        self.boundary = boundary
        self.closure = closure
        self.before = before
        self.stop = stop
        self.called = False
        self.written = before is not None

    def given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the step with this in place of the closure."""
        return ((self, *args[1:]), kwargs) if args else (args, {"closure": self})

    def __call__(self) -> Any:
        assert self.closure is not None
        if not self.called:
            self.called = True
            self.written = self.before is not None and not self.before.holds()
        with torch.enable_grad():
            loss = self.closure()
        self.judge(loss)
        return loss

    def judge(self, loss: Any) -> None:
        if not bool(self.boundary.judge(retries=True)):
            return
        if self.stop:
            raise Hopeless(loss)
        if self.before is not None:
            self.before.restore()
        raise LossScaleError(
            "gradients overflow in the first step of "
            f"{type(self.boundary.optimizer).__name__}, which has begun; nothing was "
            "written. Name the optimizer, autoamp.convert(model, optimizer), to have "
            "such a step skipped"
        )
