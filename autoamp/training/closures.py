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

from autoamp import compat
from autoamp.errors import LossScaleError
from autoamp.training.boundary import OptimizerBoundary, Step, closure_of, params_of
from autoamp.training.step import (
    Way,
    agree,
    count_skipped,
    leaves_to_scaler,
    mark,
    note_overflow,
    read,
    settle_buffers,
)


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
    # A snapshot is a copy of all weights and state: a step that last evaluated its
    # closure before it wrote anything is spared the copy.
    before = _Snapshot(boundary) if many or boundary.writes_first else None
    judged = _Judged(boundary, closure, before)
    args, kwargs = _with_closure(judged, args, kwargs)
    boundary.inside = True
    try:
        result = inner(*args, **kwargs)
        if not judged.called and _judge_evaluation(boundary) is not Way.STEP:
            raise _Hopeless(None)
    except _Hopeless as overflow:
        judged.put_back()
        _end_evaluations(boundary, skipped=True)
        return overflow.args[0]
    except LossScaleError:
        judged.put_back()
        raise
    finally:
        boundary.inside = False
    boundary.writes_first = judged.written
    _end_evaluations(boundary, skipped=False)
    return result


def first_step(
    boundary: OptimizerBoundary, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """New arguments for a step that has already begun, without the optimizer itself.

    Such a step cannot be skipped any more, so that an overflow in it is an error.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    judged = _Judged(boundary, closure, _Snapshot(boundary))

    def closure_or_error() -> Any:
        try:
            return judged()
        except _Hopeless:
            judged.put_back()
            raise LossScaleError(
                "gradients overflow in the first step of "
                f"{type(boundary.optimizer).__name__}, which has begun; nothing was "
                "written. Name the optimizer, autoamp.convert(model, optimizer), to "
                "have such a step skipped"
            ) from None
        except LossScaleError:
            judged.put_back()
            raise

    return _with_closure(closure_or_error, args, kwargs)


def _with_closure(
    closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with another closure in the place of theirs."""
    if args:
        return (closure, *args[1:]), kwargs
    return args, {**kwargs, "closure": closure}


class _Hopeless(Exception):  # noqa: N818 (never reaches the user)
    """An overflow that no lower loss scale takes away; carries the loss."""


class _Judged:
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

    def __call__(self) -> Any:
        many = isinstance(self._boundary.optimizer, LBFGS)
        if not self.called and not many:
            self.written = self._before is not None and not self._before.holds()
        self.called = True
        # This ends: a retry follows a lower scale, and at the floor `_judge_evaluation`
        # raises.
        while True:
            with torch.enable_grad():
                loss = self._closure()
            way = _judge_evaluation(self._boundary)
            if way is Way.STEP:
                return loss
            if way is Way.SKIP:
                raise _Hopeless(loss)

    def put_back(self) -> None:
        """Undoes the writes of the step."""
        if self._before is not None:
            self._before.restore()


def _judge_evaluation(boundary: OptimizerBoundary) -> Way:
    """Judges one evaluation of a closure, which has just ended.

    Raises:
        LossScaleError: gradients overflow at the lowest loss scale allowed.
    """
    reading = agree(boundary, read(boundary))
    overflow, way = bool(reading.flag), Way.STEP
    if overflow:
        # Only LBFGS's closure may be called once more: Lightning passes the whole
        # `training_step` as a closure, which must run once a step.  Each rank has loss
        # scales of its own: one would evaluate again, and wait for others that skip.
        again = isinstance(boundary.optimizer, LBFGS) and not compat.are_several()
        fell = any(
            run.overflowed and run.scaling.loss_scale.scale < float(run.used)
            for run in (reading.runs if again else ())
        )
        way = Way.RETRY if fell else Way.SKIP
    boundary.log(way.value)
    if overflow:
        settle_buffers(boundary, reading, overflow)
    if reading.known:
        note_overflow(boundary, reading, overflow)
    return way


def _end_evaluations(boundary: OptimizerBoundary, *, skipped: bool) -> None:
    """Ends a step of several evaluations: the step counts once, not once for each."""
    for scaling in boundary.scalings:
        scaling.ledger.buffers.forget()
    count_skipped(boundary.scalings, compat.clear_flag().fill_(float(skipped)))
    mark(boundary, skipped)


class _Snapshot:
    """A copy of an optimizer's weights and state, to go back to."""

    def __init__(self, boundary: OptimizerBoundary) -> None:
        self.optimizer = boundary.optimizer
        masters = () if boundary.masters is None else boundary.masters.of.values()
        self.params = [*boundary.params, *masters]
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
