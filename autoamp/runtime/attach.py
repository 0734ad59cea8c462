"""Puts a boundary on an optimizer: a `step` of its own, on the instance.

An optimizer named to `convert` is given one at once.  Any other is met at its first
step, through torch's own hook, which is registered while models are converted.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoamp import compat
from autoamp.loss_scale import LossScale
from autoamp.options import Options
from autoamp.runtime import checkpoint, closures, lbfgs
from autoamp.runtime.backwards import BACKWARDS, lower_where_nobody_steps
from autoamp.runtime.engine import Engine
from autoamp.runtime.masters import Masters, has_half
from autoamp.runtime.optimizers import closure_of, evaluated, innermost, params_of
from autoamp.runtime.overflow import gather
from autoamp.runtime.scaling import ModelScaling
from autoamp.runtime.step import BOUNDARIES, OptimizerBoundary
from autoamp.runtime.weights import before_write

_STATE = "_autoamp"

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_hook: list[RemovableHandle] = []
_expecting: list[bool] = []


def boundary_of(optimizer: Optimizer) -> OptimizerBoundary | None:
    """The boundary `optimizer` carries, or the one inside it; None where none does."""
    optimizer = innermost(optimizer)
    found = optimizer.__dict__.get(_STATE)
    # One that is off is still called by whoever wrapped it, and passes steps on.
    return found if isinstance(found, OptimizerBoundary) and not found.off else None


def attach(optimizer: Optimizer) -> OptimizerBoundary:
    """Gives `optimizer` a boundary; the one it has where there is one.

    Of a wrapper, the optimizer inside gets it: its step is the one that is taken.

    Raises:
        AutoampError: it was loaded with a state of ours that is unusable.
    """
    known = boundary_of(optimizer)
    if known is not None:
        return known
    optimizer = innermost(optimizer)
    checkpoint.check_loaded(optimizer)
    boundary = OptimizerBoundary(optimizer)
    own: Any = optimizer.step

    def inner(*args: Any, **kwargs: Any) -> Any:
        if boundary.masters is None:
            return own(*args, **kwargs)
        return boundary.masters.run(own, args, kwargs)

    # A `MethodType`, because schedulers ask for `__func__`; `wraps` keeps the signature
    # and the mark of a scheduler that was here before.
    @functools.wraps(getattr(own, "__func__", own))
    def step(self: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, torch.optim.LBFGS):
            return lbfgs.step(boundary, inner, args, kwargs)
        if closure_of(args, kwargs) and not closures.evaluates_first(self):
            return closures.step(boundary, inner, args, kwargs)
        return boundary.step(inner, args, kwargs)

    boundary.bound = types.MethodType(step, optimizer)
    optimizer.__dict__["step"] = boundary.bound
    optimizer.__dict__["step_was_skipped"] = False
    optimizer.__dict__[_STATE] = boundary
    checkpoint.carry(boundary)
    BOUNDARIES.add(boundary)
    return boundary


@contextlib.contextmanager
def attached(optimizers: Sequence[Optimizer]) -> Iterator[list[OptimizerBoundary]]:
    """Their boundaries; those that had none lose it where the block raises."""
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
    """Gives the half-precision parameters an optimizer trains fp32 masters beside it.

    Those of `model` are saved by the names they have there.
    """
    if boundary.masters is None:
        if not has_half(boundary.params):
            return
        boundary.masters = Masters(boundary.optimizer)
    boundary.masters.name_after(model)


def detach(boundary: OptimizerBoundary) -> None:
    """Takes a boundary away; `step` is what it was, unless somebody wrapped ours."""
    optimizer = boundary.optimizer
    BOUNDARIES.discard(boundary)
    for hook in boundary.hooks:
        hook.remove()
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

    One that holds another converted model's as well is met again at its next step.
    """
    held = {id(p): p for p in torch.nn.Module.parameters(model)}
    # Or another model's hook would meet the optimizer again, by what is past.
    BACKWARDS.drop(held)
    for boundary in list(BOUNDARIES):
        if any(id(p) in held for p in boundary.params):
            detach(boundary)


def meet(scaling: ModelScaling, weights: Sequence[torch.Tensor]) -> None:
    """Looks for whoever is going to step `weights`, before the first run with them.

    A GradScaler may be about to scale this model's loss: twice scaled, the first
    gradients would overflow.  So they are looked at again before a backward, unless the
    user has asked for a loss scale of ours.
    """
    optimizers, scalers = compat.optimizers_and_scalers()
    if not scaling.asked:
        scaling.scalers = [(weakref.ref(s), compat.scaler_uses(s)) for s in scalers]
    ids = {id(weight) for weight in weights}
    for optimizer in optimizers:
        groups = getattr(optimizer, "param_groups", ())
        if any(id(p) in ids for group in groups for p in group["params"]):
            attach(optimizer).link(scaling)


# -- optimizers nobody named -----------------------------------------------------------


def new_engine(
    options: Options, low: torch.dtype, label: str, loss_scale: LossScale
) -> Engine:
    """An engine; from now on optimizers are met at their first step, while it lives."""
    scaling = ModelScaling(loss_scale, label, meet, lower_where_nobody_steps)
    scaling.asked = options.loss_scale != "auto"
    engine = Engine(options, low, label, scaling)
    _engines.add(engine)
    _hear()
    return engine


def stop_listening(engine: Engine) -> None:
    """Takes the hook away with the last engine."""
    _engines.discard(engine)
    _hear()


def expect_models(coming: bool) -> None:
    """Whether steps are met before there is any engine.

    A model may be called for the first time inside a step, by its closure.
    """
    _expecting[:] = [True] if coming else []
    _hear()


def _hear() -> None:
    """Registers the hook, or removes it, as need be."""
    needed = bool(_engines) or bool(_expecting)
    if needed and not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))
    elif not needed and _hook:
        _hook.pop().remove()


def retire(engine: Engine) -> None:
    """The graphs of `engine` are not called any more; nor are steps met for them."""
    stop_listening(engine)
    for boundary in list(BOUNDARIES):
        if engine.scaling in boundary.scalings:
            boundary.scalings.remove(engine.scaling)
            if not boundary.scalings:
                detach(boundary)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Called inside every step, with the optimizer itself as `args[0]`."""
    if torch.compiler.is_dynamo_compiling():  # a step the user compiles
        return None
    # Collected, not reverted: the hook cannot go meanwhile.
    if not _engines and not (_expecting and closure_of(args[1:], kwargs)):
        return None
    changed = None
    if boundary_of(optimizer) is None:
        changed = _first_step(optimizer, args, kwargs)
    if changed is None or changed[0][0] is optimizer:
        before_write(params_of(optimizer))
    return changed


def _first_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The step of an optimizer that had no boundary when it began.

    It cannot be stopped any more, but its arguments can be changed, the optimizer among
    them: to skip, it is made to step one that holds no weights.  Where there is a
    closure, all of the model's first iteration may be inside it.
    """
    given = args[1:]
    closure = closure_of(given, kwargs)
    others = closure is not None and not closures.evaluates_first(optimizer)
    params = params_of(optimizer)
    if closure and not (others and closures.has_gradients(optimizer)):
        _, given, kwargs = evaluated(given, kwargs, params if others else ())
    evidence = gather(params, -1)
    if not evidence.runs and not evidence.elsewhere:
        return ((optimizer, *given), kwargs) if closure else None
    boundary = attach(optimizer)
    if boundary.leaves_to_scaler():
        return (optimizer, *given), kwargs
    if isinstance(optimizer, torch.optim.LBFGS):
        return lbfgs.first_step(boundary, (optimizer, *given), kwargs)
    skip = bool(boundary.judge())
    boundary.mark(skip)
    if not skip and others:
        return closures.first_step(boundary, (optimizer, *given), kwargs)
    if not skip:
        return (optimizer, *given), kwargs
    _hold_hooks_once(optimizer)
    return (_without_weights(optimizer), *given), kwargs


def _without_weights(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and settings that has nothing to step."""
    empty: Any = object.__new__(type(optimizer))
    empty.__dict__.update(optimizer.__dict__)
    empty.param_groups = [{**g, "params": []} for g in optimizer.param_groups]
    return empty  # type: ignore[no-any-return]


def _hold_hooks_once(optimizer: Any) -> None:
    """Keeps the optimizer's own hooks from this one step, which is skipped.

    Those that precede it are about to be read from their dictionary, so it is emptied;
    those that follow are looked up later.
    """
    before = optimizer._optimizer_step_pre_hooks
    after = optimizer._optimizer_step_post_hooks
    held = dict(before)
    before.clear()

    def restore(*_: Any) -> None:
        before.update(held)
        optimizer._optimizer_step_post_hooks = after

    only: OrderedDict[int, Callable[..., None]] = OrderedDict({0: restore})
    optimizer._optimizer_step_post_hooks = only
