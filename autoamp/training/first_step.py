"""Meets optimizers that were not named to `convert`, at their first step.

Torch's own hook before every step shows each optimizer; the hook is registered while
models are converted.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoamp import compat, foreign
from autoamp.messages import log_once
from autoamp.options import Options
from autoamp.overflow.remedy import Remedy
from autoamp.training import guard
from autoamp.training.attach import attach, boundary_of, detach
from autoamp.training.guard import guards_of
from autoamp.training.model_scaling import ModelScaling, ScaleDomain
from autoamp.training.optimizers import closure_of, evaluated, params_of
from autoamp.training.rank_handshake import have_shaken_hands, shake_hands
from autoamp.training.ranks import judged, owners_of, team_of
from autoamp.training.scale import LossScale, NoLossScale
from autoamp.training.step import closures
from autoamp.training.step.agree import agree
from autoamp.training.step.boundary import BOUNDARIES, OptimizerBoundary
from autoamp.training.step.decide import Way, decide_begun
from autoamp.training.step.move import move
from autoamp.training.step.read import gather, read
from autoamp.training.step.take import leaves_to_scaler
from autoamp.training.uncalled import tell_of_uncalled
from autoamp.weights.copies import before_write

logger = logging.getLogger(__name__)

_scalings: weakref.WeakSet[ModelScaling] = weakref.WeakSet()
_hook: list[RemovableHandle] = []
_expecting: list[bool] = []


def new_scaling(
    options: Options,
    loss_scale: LossScale,
    label: str,
    find_models: Callable[[ModelScaling], Sequence[torch.nn.Module]] | None = None,
    on_remedy: Sequence[Callable[[ModelScaling, Remedy], None]] = (),
    *,
    low: torch.dtype | None = None,
    automatic: bool = False,
    on_step: Sequence[Callable[..., None]] = (),
) -> ModelScaling:
    """The scaling of one conversion; optimizers are met as long as the scaling lives.

    Args:
        options: the options of the conversion.
        loss_scale: the loss scale to begin with.
        label, find_models, on_remedy, low, automatic, on_step: as for `ModelScaling`.
    """
    scaling = ModelScaling(
        ScaleDomain(loss_scale),
        label,
        low=low,
        asked=options.loss_scale != "auto",
        automatic=automatic,
        by_variables=options.by_variables,
        find_models=find_models,
        on_remedy=on_remedy,
        on_step=on_step,
    )
    guard.begin(scaling, options)
    _scalings.add(scaling)
    _set_hook()
    return scaling


def guard_masters(
    boundary: OptimizerBoundary, model: torch.nn.Module, options: Options, label: str
) -> None:
    """Guards steps of fp32 masters whose half-precision model is not captured.

    Args:
        model: the model, none of whose calls is changed.
    """
    if boundary.masters is None:
        return
    known = [s for s in boundary.scalings if any(m is model for m in s.models)]
    ref = weakref.ref(model)

    def alive(_: ModelScaling) -> list[torch.nn.Module]:
        return [each for each in [ref()] if each is not None]

    for scaling in known or [new_scaling(options, NoLossScale(), label, alive)]:
        scaling.ledger.note_low()
        guard.begin(scaling, options)
        boundary.link(scaling)


def end_scaling(scaling: ModelScaling) -> None:
    """Meets no optimizers for `scaling` any more; the last scaling takes the hook."""
    _scalings.discard(scaling)
    guard.end(scaling)
    _set_hook()


def expect_models(coming: bool) -> None:
    """Sets whether optimizers are met before there is any scaling.

    A closure may call a model for the first time inside a step.
    """
    _expecting[:] = [True] if coming else []
    _set_hook()


def _set_hook() -> None:
    """Registers the hook, or removes it, as need be."""
    needed = bool(_scalings) or bool(_expecting)
    if needed and not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))
    elif not needed and _hook:
        _hook.pop().remove()


def retire(scaling: ModelScaling) -> None:
    """Ends `scaling`, with which graphs are not run any more."""
    end_scaling(scaling)
    for boundary in list(BOUNDARIES):
        if scaling in boundary.scalings:
            boundary.scalings.remove(scaling)
            if not boundary.scalings:
                detach(boundary)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Called inside every step, with the optimizer itself as `args[0]`."""
    if torch.compiler.is_dynamo_compiling():  # a step the user compiles
        return None
    # Models that were garbage-collected, not reverted, have left the hook behind.
    if not _scalings and not (_expecting and closure_of(args[1:], kwargs)):
        return None
    engine = "" if boundary_of(optimizer) else foreign.stepped_by()
    if engine:
        log_once(logger, logging.INFO, f"autoamp: {engine}")
        before_write(params_of(optimizer))
        return None
    tell_of_uncalled(optimizer, _scalings)
    changed = None
    if compat.are_several() and not have_shaken_hands(optimizer):
        _shake_hands(optimizer)
    if boundary_of(optimizer) is None:
        changed = _first_step(optimizer, args, kwargs)
    if changed is None or changed[0][0] is optimizer:
        before_write(params_of(optimizer))
    return changed


def _shake_hands(optimizer: Optimizer) -> None:
    """Has the ranks shake hands where no loss scale makes them agree on steps."""
    if _strangers.get(optimizer) == len(_scalings):
        return
    params = params_of(optimizer)
    owners = owners_of(params, _scalings)
    if not owners:
        _strangers[optimizer] = len(_scalings)
    shake_hands(optimizer, team_of(owners, params), owners, params)


_strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers of no converted model, with how many conversions there were then."""


def _first_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Judges a step that began when its optimizer had no boundary.

    Such a step cannot be stopped any more, but its arguments can be changed, the
    optimizer among them: a step to be skipped is made to step an optimizer that holds
    no weights.  Where there is a closure, all of the model's first iteration may be
    inside the closure.

    Returns:
        The changed arguments, or None.
    """
    given = args[1:]
    closure = closure_of(given, kwargs)
    others = closure is not None and not closures.evaluates_first(optimizer)
    params = params_of(optimizer)
    if closure and not (others and closures.has_gradients(optimizer)):
        _, given, kwargs = evaluated(given, kwargs, params if others else ())
    evidence = gather(params, -1)
    owners = owners_of(params, judged(_scalings))
    owners += [s for s in guards_of(optimizer, params) if not s.enabled]
    owners += [s for s in _listening(params) if s not in owners]
    if not (evidence.runs or evidence.elsewhere or owners):
        return ((optimizer, *given), kwargs) if closure else None
    boundary = attach(optimizer)
    for scaling in owners:
        boundary.link(scaling)
    if leaves_to_scaler(boundary):
        return (optimizer, *given), kwargs
    if isinstance(optimizer, torch.optim.LBFGS):
        return closures.first_step(boundary, (optimizer, *given), kwargs)
    reading = agree(boundary, read(boundary))
    decision = decide_begun(reading)
    move(boundary, reading, decision)
    if decision.way is Way.STEP and others:
        return closures.first_step(boundary, (optimizer, *given), kwargs)
    if decision.way is Way.STEP:
        return (optimizer, *given), kwargs
    _hold_hooks_once(optimizer)
    return (_without_weights(optimizer), *given), kwargs


def _listening(params: Sequence[torch.Tensor]) -> list[ModelScaling]:
    """The models that are told of steps and have weights among `params`."""
    told = [scaling for scaling in _scalings if scaling.on_step]
    held = {id(p) for p in params} if told else set()
    return [s for s in told if not held.isdisjoint(map(id, s.weights))]


def _without_weights(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and settings that has nothing to step."""
    empty: Any = object.__new__(type(optimizer))
    empty.__dict__.update(optimizer.__dict__)
    empty.param_groups = [{**g, "params": []} for g in optimizer.param_groups]
    return empty  # type: ignore[no-any-return]


def _hold_hooks_once(optimizer: Any) -> None:
    """Keeps the optimizer's own hooks from this one step, which is skipped.

    The hooks before the step are about to be read from their dictionary, so that
    dictionary is emptied; the hooks after the step are looked up later, so those are
    replaced.
    """
    before, after = compat.step_hooks(optimizer)
    held = dict(before)
    before.clear()

    def restore(*_: Any) -> None:
        before.update(held)
        compat.set_hooks_after_step(optimizer, after)

    only: OrderedDict[int, Callable[..., None]] = OrderedDict({0: restore})
    compat.set_hooks_after_step(optimizer, only)
