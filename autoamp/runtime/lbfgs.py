"""LBFGS, which evaluates the loss many times inside one step.

Its line search moves the weights before it knows where to, so an overflow is met there
and then: the loss is evaluated again at a lower scale, with the same result as a clean
run's.  Where no lower scale helps, weights and state are put back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoamp.errors import LossScaleError
from autoamp.loss_scale import DynamicLossScale
from autoamp.runtime.step import OptimizerBoundary, Step


class Hopeless(Exception):  # noqa: N818 (never reaches the user)
    """An overflow that no lower scale takes away; carries the loss."""


def step(
    boundary: OptimizerBoundary,
    inner: Step,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One step, or nothing: see `OptimizerBoundary.step`."""
    closure = args[0] if args else kwargs.get("closure")
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
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
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


class Snapshot:
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
