"""Puts a boundary on an optimizer: a `step` on the instance, round the class's own.

An optimizer named to `convert` is given a boundary at once.  Any other optimizer is met
at its first step, through torch's own hook, which is registered while models are
converted.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from autoamp import compat
from autoamp.training import saved_state
from autoamp.training.ledger.backwards import BACKWARDS
from autoamp.training.masters import Masters, has_half
from autoamp.training.optimizers import closure_of, innermost
from autoamp.training.step import closures
from autoamp.training.step.boundary import BOUNDARIES, OptimizerBoundary
from autoamp.training.step.take import take
from autoamp.training.step.wrappers import show_on_wrappers

_STATE = "_autoamp"


def boundary_of(optimizer: Optimizer) -> OptimizerBoundary | None:
    """The boundary of `optimizer`, or of the optimizer that it wraps, or None."""
    optimizer = innermost(optimizer)
    found = optimizer.__dict__.get(_STATE)
    # A boundary that is off only passes steps on, for code that has wrapped its `step`.
    return found if isinstance(found, OptimizerBoundary) and not found.off else None


def attach(optimizer: Optimizer) -> OptimizerBoundary:
    """Gives `optimizer` a boundary, or returns the boundary that it has.

    Inside wrappers the innermost optimizer gets the boundary, because the innermost
    step is the step that is taken.

    Raises:
        AutoampError: the optimizer was loaded with an unusable state of ours.
    """
    outer, known = optimizer, boundary_of(optimizer)
    if known is not None:
        known.note_outer(outer)
        return known
    optimizer = innermost(optimizer)
    saved_state.check_loaded(optimizer)
    boundary = OptimizerBoundary(optimizer)
    boundary.note_outer(outer)
    own: Any = optimizer.step

    def inner(*args: Any, **kwargs: Any) -> Any:
        if boundary.masters is None:
            return own(*args, **kwargs)
        return boundary.masters.run(own, args, kwargs)

    # `step` becomes a `MethodType`, because schedulers ask for `__func__`; `wraps`
    # keeps the signature, and the mark of a scheduler that was here before.
    @functools.wraps(getattr(own, "__func__", own))
    def step(self: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        if closure_of(args, kwargs) and closures.writes_first(self):
            return closures.step(boundary, inner, args, kwargs)
        return take(boundary, inner, args, kwargs)

    boundary.bound = types.MethodType(step, optimizer)
    optimizer.__dict__["step"] = boundary.bound
    optimizer.__dict__["step_was_skipped"] = False
    optimizer.__dict__[_STATE] = boundary
    saved_state.carry(boundary)
    BOUNDARIES.add(boundary)
    return boundary


@contextlib.contextmanager
def attached(optimizers: Sequence[Optimizer]) -> Iterator[list[OptimizerBoundary]]:
    """The boundaries of `optimizers`; new boundaries go again if the block raises."""
    new = [each for each in optimizers if boundary_of(each) is None]
    try:
        yield [attach(each) for each in optimizers]
    except BaseException:
        for each in new:
            boundary = boundary_of(each)
            if boundary is not None:
                detach(boundary)
        raise


def give_masters(boundary: OptimizerBoundary, model: torch.nn.Module) -> None:
    """Gives an optimizer's half-precision parameters fp32 masters.

    Masters of parameters of `model` are saved by the parameters' names in `model`.
    """
    if boundary.masters is None:
        if not has_half(boundary.params):
            return
        boundary.masters = Masters(boundary.optimizer)
    boundary.masters.name_after(model)


def detach(boundary: OptimizerBoundary) -> None:
    """Takes a boundary away and the old `step` back, unless ours has been wrapped."""
    optimizer = boundary.optimizer
    BOUNDARIES.discard(boundary)
    for hook in boundary.hooks:
        hook.remove()
    show_on_wrappers(boundary, False)
    if boundary.masters is not None:
        boundary.masters.release()
        boundary.masters = None
    if optimizer.__dict__.get("step") != boundary.bound:
        boundary.off = True
        return
    for name in ("step", "step_was_skipped", _STATE):
        optimizer.__dict__.pop(name, None)
    if boundary.previous is not None:
        optimizer.__dict__["step"] = boundary.previous


def detach_from(model: torch.nn.Module) -> None:
    """Takes away the boundary of every optimizer that holds weights of `model`.

    An optimizer that also holds another converted model's weights is met again at its
    next step.
    """
    # Not by `parameters()`: a module may have no hash, or `parameters` of its own.
    modules = compat.modules_of(model)
    values = [p for each in modules for p in compat.parameters_here(each).values()]
    held = {id(p): p for p in values if p is not None}
    # Otherwise the hook, kept for another model, would find past runs of this model's
    # and meet the optimizer again.
    BACKWARDS.drop(held)
    for boundary in list(BOUNDARIES):
        if any(id(p) in held for p in boundary.params):
            detach(boundary)
