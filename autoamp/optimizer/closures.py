"""Steps of optimizers that write before all their gradients are known.

Torch's own evaluate a closure before anything else, so that it can be evaluated before
the step.  Others may read the gradients that are there and move the weights first, as
SAM does.  LBFGS evaluates it many times: its line search moves the weights before it
knows where to, and where an evaluation overflows, the loss is evaluated again at a
lower scale, with the result of a clean run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer
from torch.utils import _pytree as pytree

from autoamp.errors import LossScaleError
from autoamp.loss_scale import DynamicLossScale
from autoamp.optimizer.optimizers import closure_of, params_of
from autoamp.optimizer.step import OptimizerBoundary, Step


def writes_first(optimizer: Optimizer) -> bool:
    """Whether its step may write before the closure's last gradients are known."""
    return isinstance(optimizer, LBFGS) or not evaluates_first(optimizer)


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

    Where it is skipped, what was written is put back.  The copy for that is made in the
    first step; later, where one was needed, and always for LBFGS.
    """
    closure = closure_of(args, kwargs)
    if closure is None or boundary.leaves_to_scaler():
        return inner(*args, **kwargs)
    many = isinstance(boundary.optimizer, LBFGS)
    before = _Snapshot(boundary) if many or boundary.writes_first else None
    guarded = _Guarded(boundary, closure, before)
    args, kwargs = guarded.given(args, kwargs)
    try:
        result = inner(*args, **kwargs)
        if not guarded.called and boundary.judge(retries=True):
            raise _Hopeless(None)
    except _Hopeless as overflow:
        guarded.put_back()
        boundary.finish(skipped=True)
        return overflow.args[0]
    except LossScaleError:
        guarded.put_back()
        raise
    boundary.writes_first = guarded.written
    boundary.finish()
    return result


def first_step(
    boundary: OptimizerBoundary, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments for a step that has begun already; None: those that it has.

    It cannot be skipped any more, so that an overflow is an error there.
    """
    closure = closure_of(args[1:], kwargs)
    if closure is None:
        return None
    guarded = _Guarded(boundary, closure, _Snapshot(boundary))

    def closure_or_error() -> Any:
        try:
            return guarded()
        except _Hopeless:
            guarded.put_back()
            raise LossScaleError(
                "gradients overflow in the first step of "
                f"{type(boundary.optimizer).__name__}, which has begun; nothing was "
                "written. Name the optimizer, autoamp.convert(model, optimizer), to "
                "have such a step skipped"
            ) from None
        except LossScaleError:
            guarded.put_back()
            raise

    if len(args) > 1:
        return (args[0], closure_or_error, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_or_error}


class _Hopeless(Exception):  # noqa: N818 (never reaches the user)
    """An overflow that no lower scale takes away; carries the loss."""


class _Guarded:
    """A closure whose gradients are judged as soon as it has been evaluated.

    Attributes:
        called: it has been evaluated.
        written: something was written before it was evaluated first.
    """

    def __init__(
        self,
        boundary: OptimizerBoundary,
        closure: Callable[[], Any],
        before: _Snapshot | None,
    ) -> None:
        self.called = False
        self.written = before is not None
        self._boundary = boundary
        self._closure = closure
        self._before = before
        self._again = isinstance(boundary.optimizer, LBFGS)

    def given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the step with this in place of the closure."""
        if args:
            return (self, *args[1:]), kwargs
        return args, {**kwargs, "closure": self}

    def __call__(self) -> Any:
        if not self.called and not self._again:
            self.written = self._before is not None and not self._before.holds()
        self.called = True
        while True:
            with torch.enable_grad():
                loss = self._closure()
            if not self._boundary.judge(retries=True):
                return loss
            if not (self._again and self._can_lower()):
                raise _Hopeless(loss)

    def put_back(self) -> None:
        """Undoes what the step has written."""
        if self._before is not None:
            self._before.restore()

    def _can_lower(self) -> bool:
        scales = self._boundary.loss_scales
        return bool(scales) and all(isinstance(s, DynamicLossScale) for s in scales)


class _Snapshot:
    """Weights and state of an optimizer, to go back to."""

    def __init__(self, boundary: OptimizerBoundary) -> None:
        self.optimizer = boundary.optimizer
        self.params = boundary.weights
        self.values = [p.detach().clone() for p in self.params]
        self.state = self._copied(self.optimizer.state)

    def restore(self) -> None:
        with torch.no_grad():
            for param, value in zip(self.params, self.values, strict=True):
                param.copy_(value)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)

    def holds(self) -> bool:
        """Whether nothing has been written since."""
        now = [p.detach() for p in self.params], self._copied(self.optimizer.state)
        pairs = zip(
            pytree.tree_leaves(now),
            pytree.tree_leaves((self.values, self.state)),
            strict=False,
        )
        return len(now[1]) == len(self.state) and all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            for a, b in pairs
        )

    def _copied(self, state: Any) -> Any:
        # The keys are the weights themselves.
        return copy.deepcopy(dict(state), {id(p): p for p in self.params})
