"""Optimizers that change weights during a step: LBFGS, SAM.

Torch's own optimizers evaluate a closure before anything else, so that autoamp can
evaluate the closure before the step.  Other optimizers may read the gradients that are
there and move the weights first, as SAM does.  LBFGS evaluates its closure many times,
because its line search moves the weights before it knows where to.  Where one of these
evaluations overflows, the loss is evaluated again at a lower loss scale, with the same
result as in a run without overflow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer
from torch.utils import _pytree as pytree

from autoamp.errors import LossScaleError
from autoamp.training.optimizers import closure_of, params_of
from autoamp.training.step.agree import agree
from autoamp.training.step.boundary import OptimizerBoundary, Step
from autoamp.training.step.decide import Decision, Way, decide_evaluation
from autoamp.training.step.move import end_evaluations, move_evaluation
from autoamp.training.step.read import read
from autoamp.training.step.take import leaves_to_scaler


def writes_first(optimizer: Optimizer) -> bool:
    """Whether the step may write before the closure's last gradients are known."""
    return isinstance(optimizer, LBFGS) or not evaluates_first(optimizer)


def evaluates_first(optimizer: Optimizer) -> bool:
    """Whether the step is torch's, which evaluates the closure before anything else."""
    module = getattr(type(optimizer).step, "__module__", None) or ""
    return module.startswith("torch.optim")


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether there are gradients that a step could read before its closure runs."""
    return any(p.grad is not None for p in params_of(optimizer))


def step(
    boundary: OptimizerBoundary,
    inner: Step,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Takes or skips one step with a closure: see `take`.

    A skipped step's writes are undone from a snapshot.  The snapshot is made in the
    first step, and in a later one if the step before it wrote something before its
    closure was evaluated; for LBFGS in every step.
    """
    closure = closure_of(args, kwargs)
    assert closure is not None, "a step without a closure is the boundary's own"
    if leaves_to_scaler(boundary):
        return inner(*args, **kwargs)
    many = isinstance(boundary.optimizer, LBFGS)
    before = _Snapshot(boundary) if many or boundary.writes_first else None
    guarded = _Guarded(boundary, closure, before)
    args, kwargs = guarded.given(args, kwargs)
    try:
        result = inner(*args, **kwargs)
        if not guarded.called and _decided(boundary).overflow:
            raise _Hopeless(None)
    except _Hopeless as overflow:
        guarded.put_back()
        end_evaluations(boundary, skipped=True)
        return overflow.args[0]
    except LossScaleError:
        guarded.put_back()
        raise
    boundary.writes_first = guarded.written
    end_evaluations(boundary)
    return result


def first_step(
    boundary: OptimizerBoundary, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """New arguments for a step that has already begun; None to keep the old ones.

    Such a step cannot be skipped any more, so that an overflow in it is an error.
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


def _decided(boundary: OptimizerBoundary) -> Decision:
    """The decision about one evaluation of a closure, which has just ended."""
    reading = agree(boundary, read(boundary))
    decision = decide_evaluation(boundary, reading)
    move_evaluation(boundary, reading, decision)
    return decision


class _Hopeless(Exception):  # noqa: N818 (never reaches the user)
    """An overflow that no lower loss scale takes away; carries the loss."""


class _Guarded:
    """A closure whose gradients are judged as soon as it has been evaluated.

    Attributes:
        called: whether the closure has been evaluated.
        written: whether the step wrote something before the first evaluation.
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
        """The arguments of the step with this object in place of the closure."""
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
            decision = _decided(self._boundary)
            if decision.way is Way.STEP:
                return loss
            if decision.way is Way.SKIP:
                raise _Hopeless(loss)

    def put_back(self) -> None:
        """Undoes the writes of the step."""
        if self._before is not None:
            self._before.restore()


class _Snapshot:
    """A copy of an optimizer's weights and state, to go back to."""

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
        """Whether nothing has been written since the snapshot."""
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
        # The keys are the weights themselves, which must not be copied.
        return copy.deepcopy(dict(state), {id(p): p for p in self.params})
