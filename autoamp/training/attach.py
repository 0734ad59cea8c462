"""Puts a boundary on an optimizer: a `step` on the instance, round the class's own.

An optimizer named to `convert` is given a boundary at once, and so are the optimizers
that exist when a scaled graph first runs.  Any other optimizer is met at its first
step, through torch's own hook, which is registered while models are converted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
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
from autoamp.dtypes import HALVES, short_name
from autoamp.messages import bytes_text, class_name, counted, log_once
from autoamp.training import closures, foreign_engines, guard, half_models
from autoamp.training.boundary import (
    BOUNDARIES,
    OptimizerBoundary,
    boundaries,
    check_loaded,
    closure_of,
    computing_round,
    innermost,
    params_of,
)
from autoamp.training.elementwise_optimizers import body_of
from autoamp.training.half_optimizers import trains_half
from autoamp.training.ledger import BACKWARDS, GraphRun
from autoamp.training.masters import Masters, given_out, has_half, have_masters
from autoamp.training.meter import METERS, meter_of
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.options import Options
from autoamp.training.ranks import (
    have_shaken_hands,
    judged,
    owners_of,
    shake_hands,
    team_of,
)
from autoamp.training.scale import LossScale, NoLossScale, free_to_read
from autoamp.training.step import (
    Way,
    evaluated,
    judge,
    leaves_to_scaler,
    not_finite,
    take,
)
from autoamp.training.uncalled import tell_of_uncalled
from autoamp.training.weight_copies import before_write
from autoamp_said import logger_of

logger = logger_of(__name__)

_STATE = "_autoamp"

_Changed = tuple[tuple[Any, ...], dict[str, Any]] | None
"""The changed arguments of a step, with the optimizer; None where nothing changes."""

_scalings: weakref.WeakSet[ModelScaling] = weakref.WeakSet()
_hook: list[RemovableHandle] = []
_expecting: list[Options] = []

_met_by_masters: weakref.WeakSet[OptimizerBoundary] = weakref.WeakSet()
"""The boundaries that were made because their optimizers train half weights."""

_declined: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose weights are to have no masters, or cannot have any."""

_searched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose half-precision models the automatic mode has looked for."""

_found: weakref.WeakSet[ModelScaling] = weakref.WeakSet()
"""The scalings that guard half-precision models which nobody named."""


# -- boundaries ------------------------------------------------------------------------


def boundary_of(optimizer: Optimizer) -> OptimizerBoundary | None:
    """The boundary of `optimizer`, or of the optimizer that it wraps, or None."""
    optimizer = innermost(optimizer)
    state = optimizer.__dict__.get(_STATE)
    # A boundary that is off only passes steps on, for code that has wrapped its `step`.
    return state if isinstance(state, OptimizerBoundary) and not state.off else None


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
    check_loaded(optimizer)
    boundary = OptimizerBoundary(optimizer)
    boundary.note_outer(outer)
    boundary.bound = _step_of(boundary, optimizer)
    optimizer.__dict__["step"] = boundary.bound
    # The attributes stand on the instance: the class, and the optimizer's saved state,
    # stay as they are.
    optimizer.__dict__["step_was_skipped"] = False
    optimizer.__dict__[_STATE] = boundary
    boundary.carry()
    BOUNDARIES.add(boundary)
    return boundary


def _step_of(boundary: OptimizerBoundary, optimizer: Optimizer) -> Callable[..., Any]:
    """A `step` for an optimizer's `__dict__`, which does not keep it alive.

    A method bound to the optimizer would: `del optimizer` would free its state, three
    times the weights, only when Python's collector runs.
    """
    known, of = weakref.ref(boundary), weakref.ref(optimizer)
    # A scheduler's wrapper, say, which torch puts on the instance.
    own, function = boundary.previous, type(optimizer).step

    # `wraps` keeps the signature, and the mark of a scheduler that was here before.
    @functools.wraps(getattr(own, "__func__", own) if own else function)
    def step(self: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        found: Any = known()
        plain = own or types.MethodType(function, self)
        if found is None:
            return plain(*args, **kwargs)
        inner = functools.partial(_with_masters, found, plain)
        if closure_of(args, kwargs) and closures.writes_first(self):
            return closures.step(found, inner, args, kwargs)
        return take(found, inner, args, kwargs)

    @functools.wraps(step)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return step(of(), *args, **kwargs)  # type: ignore[arg-type]

    # Schedulers ask a `step` for its function, as if it were a method; GradScaler asks
    # for its parameters.
    method: Any = bound
    method.__func__ = step
    _, *others = inspect.signature(step).parameters.values()
    method.__signature__ = inspect.Signature(others)
    return bound


def _with_masters(
    boundary: OptimizerBoundary, step: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    masters = boundary.masters
    if masters is None and not hasattr(step, "_torchdynamo_orig_callable"):
        masters = _masters_since(boundary)
    return step(*args, **kwargs) if masters is None else masters.run(step, args, kwargs)


def _masters_since(boundary: OptimizerBoundary) -> Masters | None:
    """Masters for half-precision weights that no one knew of before this step."""
    optimizer, options = boundary.optimizer, boundary.wanted
    if HALVES.isdisjoint([p.dtype for p in params_of(optimizer)]):
        return None
    if torch.compiler.is_dynamo_compiling():
        return None
    if _expecting:
        take_on(optimizer)
    elif options is None:
        _share(optimizer)
    else:  # the model was made a half-precision one after `convert`
        models = [model for scaling in boundary.scalings for model in scaling.models]
        give_masters(boundary, models, options)
    return boundary.masters


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


def introduce(
    boundary: OptimizerBoundary,
    model: torch.nn.Module,
    options: Options,
    scaling: ModelScaling | None,
) -> None:
    """Links the boundary of an optimizer to the model that the optimizer trains.

    Args:
        scaling: the scaling that guards the model; None without one.
    """
    if options.masters == "off":
        decline_masters(boundary)
    else:
        boundary.wanted = options
        give_masters(boundary, [model], options)
    without = boundary.masters is None or boundary.masters.cannot
    if without and has_half(boundary.params):
        meter_of(boundary.optimizer)
    if scaling is not None:
        boundary.link(scaling)


def give_masters(
    boundary: OptimizerBoundary, models: Sequence[torch.nn.Module], options: Options
) -> None:
    """Gives an optimizer's half-precision parameters fp32 masters.

    Masters of parameters of `models` are saved by the parameters' names in these.
    """
    if boundary.masters is not None:
        boundary.masters.name_after(*models)
    elif has_half(boundary.params):
        boundary.masters = Masters(boundary.optimizer, split=options.masters != "fp32")
        boundary.masters.name_after(*models)
        _serve_outer(boundary)
        _say_made(boundary.masters, options)


def _serve_outer(boundary: OptimizerBoundary) -> None:
    if boundary.outer is not None and boundary.masters is not None:
        boundary.masters.serve(boundary.outer)


def decline_masters(boundary: OptimizerBoundary) -> None:
    """Takes an optimizer's masters away, and lets the automatic mode give it none."""
    _decline(boundary.optimizer)
    boundary.wanted = None
    _take_masters(boundary)


def _take_masters(boundary: OptimizerBoundary) -> None:
    if boundary.masters is not None:
        boundary.masters.release()
        boundary.masters = None


def take_on(optimizer: Optimizer) -> None:
    """Gives an optimizer that nobody named masters and a guard, if it trains half.

    Only the automatic mode does so.  Where masters cannot be made, a warning says so
    and nothing is changed.
    """
    options = _expecting[0] if _expecting else None
    if options is None:
        return
    masters = options.masters != "off" and optimizer not in _declined
    masters = masters and not _has_masters(optimizer)
    search = options.guard and optimizer not in _searched
    if not (masters or search) or not trains_half(optimizer):
        return
    if foreign_engines.engine_stepping():  # whose engine has masters of its own
        _decline(optimizer)
        _searched.add(optimizer)
        return
    known = boundary_of(optimizer)
    try:
        outer = computing_round(optimizer) if masters else None
        if outer is not None:
            _take_on_later(optimizer, outer)
            masters = False
        models = compat.models_of_weights(params_of(optimizer))
        if search:
            _guard_found(optimizer, models, options)
        if not masters:
            return
        with attached([optimizer]) as [boundary]:
            boundary.masters = _masters_for(boundary.optimizer, models, options)
            _serve_outer(boundary)
    except Exception as error:  # a script must not fail because of autoamp
        if options.strict:
            raise
        _decline(optimizer)
        _say_failed(optimizer, error, options)
        return
    if known is None:
        _met_by_masters.add(boundary)
    if boundary.masters.cannot:
        meter_of(boundary.optimizer)
    _say_made(boundary.masters, options)


def _take_on_later(optimizer: Optimizer, outer: Optimizer) -> None:
    """Gives an optimizer masters in the next backward, when no step is halfway.

    The step of an optimizer round it (SAM, Lookahead) has state in half precision in
    its hands.
    """
    if optimizer in _waiting:
        return
    _waiting.add(optimizer)
    inner = weakref.ref(innermost(optimizer))
    around = weakref.ref(outer)
    first = next(p for p in params_of(optimizer) if p.requires_grad)

    def take(_: torch.Tensor) -> None:
        optimizer, outer = inner(), around()
        if optimizer is not None and computing_round(optimizer):
            return  # a method of the outer one runs this very backward
        handle.remove()
        if optimizer is None or outer is None:
            return
        _waiting.discard(optimizer)
        take_on(optimizer)
        boundary = boundary_of(optimizer)
        if boundary is not None:
            boundary.note_outer(outer)
            _serve_outer(boundary)

    handle = first.register_post_accumulate_grad_hook(take)


_alone: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers of weights without masters, with how many had been given masters then."""

_waiting: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that get masters in the next backward."""


def _share(optimizer: Optimizer) -> None:
    """Gives an optimizer masters because another steps masters of its weights.

    The weights have gradients in fp32, beside which weights in half precision would
    be an error in most steps.
    """
    params, count = params_of(optimizer), given_out()
    # A look at each weight would cost every step of every other optimizer.
    if _alone.get(optimizer) == count or optimizer in _declined:
        return
    if not (has_half(params) and have_masters(params)):
        _alone[optimizer] = count
        return
    models = compat.models_of_weights(params)
    with attached([optimizer]) as [boundary]:
        boundary.masters = _masters_for(boundary.optimizer, models, Options())
    _serve_outer(boundary)
    _say_made(boundary.masters, Options())


def _guard_found(
    optimizer: Optimizer, models: Sequence[torch.nn.Module], options: Options
) -> None:
    """Guards the half-precision models that an optimizer trains and nobody named."""
    _searched.add(optimizer)
    params = params_of(optimizer)
    guarding = [s for s in _scalings if s.ledger.guards and has_half(s.weights)]
    for model in models:
        inside = set(map(id, compat.modules_of(model)))
        # Where a part of the model is guarded, every gradient is looked at.
        if not any(id(part) in inside for s in guarding for part in s.models):
            guard_half(compat.inside_wrappers(model), options, automatic=True)
    if not models:  # the script calls functions with its weights
        scaling = new_scaling(options, NoLossScale(), class_name(optimizer))
        scaling.ledger.note_low()
        scaling.ledger.note_leaves(params)
        _found.add(scaling)
        attach(optimizer).link(scaling)


def before_unscaling(optimizer: Optimizer) -> None:
    """Has a GradScaler that is about to unscale gradients find them in fp32."""
    optimizer = innermost(optimizer)
    take_on(optimizer)
    boundary = boundary_of(optimizer)
    if boundary is not None and boundary.masters is not None:
        boundary.masters.widen()


def after_update() -> None:
    """Has gradients be reduced in half precision again, once a GradScaler is done."""
    for boundary in boundaries():
        if boundary.masters is not None:
            boundary.masters.narrow()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say_compiled() -> None:
    """Says, while a compiler records a first step, that half weights have no masters.

    Their gradients, state and places in the step are in the graph by then.
    """
    log_once(
        logger,
        logging.WARNING,
        "autoamp: half-precision weights whose optimizer's first step is compiled have "
        "no fp32 masters, and small updates are rounded away. Name the optimizer, "
        "autoamp.convert(model, optimizer), or take the step outside of torch.compile",
    )


def _has_masters(optimizer: Optimizer) -> bool:
    boundary = boundary_of(optimizer)
    return boundary is not None and boundary.masters is not None


def _decline(optimizer: Optimizer) -> None:
    """Has the weights of `optimizer` get no masters, unless `convert` gives them."""
    _declined.add(optimizer)


def _masters_for(
    optimizer: Optimizer, models: Sequence[torch.nn.Module], options: Options
) -> Masters:
    """The masters of an optimizer that nobody named.

    They are saved by the names that the outermost modules have for the weights.
    """
    params = params_of(optimizer)
    masters = Masters(optimizer, split=options.masters != "fp32")
    try:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # A model that was not found may be inside DistributedDataParallel.
            ids = {id(p) for model in models for p in model.parameters()}
            masters.keep_half(p for p in params if id(p) not in ids)
        masters.name_after(*models)
    except BaseException:
        masters.release()
        raise
    return masters


def _say_made(masters: Masters, options: Options) -> None:
    """Says which weights have masters from now on, and what the masters cost."""
    params = masters.params
    if not params:
        return
    dtypes = sorted({short_name(p.dtype) for p in params})
    logger.info(
        "autoamp: %s updates fp32 masters of %s in %s from now on, so that no small "
        "update is rounded away. The masters take %s, and the gradients and the state "
        "of the optimizer are fp32 too; %s does without",
        class_name(masters.optimizer),
        counted(len(params), "weight"),
        " and ".join(dtypes),
        bytes_text(masters.bytes),
        options.advice("masters", "off"),
    )
    alone = body_of(masters.optimizer) is not None
    if (
        masters.of
        and options.masters != "fp32"
        and not (alone and options.masters == "auto")
    ):
        logger.log(
            logging.WARNING if options.masters == "split" else logging.INFO,
            "autoamp: the masters of %s take 4 bytes each, not 2: %s",
            counted(len(masters.of), "weight"),
            "the weights are fp16, have gaps in memory, or are of several optimizers"
            if alone
            else f"{class_name(masters.optimizer)} may look at several weights at once",
        )


def _say_failed(optimizer: Optimizer, error: Exception, options: Options) -> None:
    """Says that weights have no masters, and why; nothing of them was changed."""
    logger.warning(
        "autoamp: the half-precision weights of %s have no fp32 masters, and small "
        "updates are rounded away: %s: %s. Give the masters room, 4 bytes a weight, or "
        "decline them by %s",
        class_name(optimizer),
        type(error).__name__,
        str(error).partition("\n")[0],
        options.advice("masters", "off"),
    )


def detach(boundary: OptimizerBoundary) -> None:
    """Takes a boundary away and the old `step` back, unless ours has been wrapped."""
    optimizer = boundary.optimizer
    BOUNDARIES.discard(boundary)
    for hook in boundary.hooks:
        hook.remove()
    boundary.show_on_wrappers(False)
    if optimizer in METERS:
        METERS[optimizer].remove()
    _take_masters(boundary)
    boundary.wanted = None
    # Code that has wrapped our `step` would put back a `step` that is gone; the
    # boundary stays, and passes steps on.
    if optimizer.__dict__.get("step") != boundary.bound:
        boundary.off = True
        return
    for name in ("step", "step_was_skipped", "__reduce_ex__", _STATE):
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
    by_id = {id(p): p for p in values if p is not None}
    for boundary in boundaries():
        # A model that was not converted has no part in masters that nobody asked for.
        alone = boundary in _met_by_masters and _found.issuperset(boundary.scalings)
        if not alone and any(id(p) in by_id for p in boundary.params):
            detach(boundary)


# -- conversions -----------------------------------------------------------------------


def new_scaling(
    options: Options,
    loss_scale: LossScale,
    label: str,
    find_models: Callable[[ModelScaling], Sequence[torch.nn.Module]] | None = None,
    *,
    low: torch.dtype | None = None,
    automatic: bool = False,
) -> ModelScaling:
    """The scaling of one conversion; optimizers are met as long as the scaling lives.

    Args:
        options: the options of the conversion.
        loss_scale: the loss scale to begin with.
        label, find_models, low, automatic: as for `ModelScaling`.
    """
    scaling = ModelScaling(
        loss_scale,
        label,
        low=low,
        asked=options.loss_scale != "auto",
        automatic=automatic,
        by_variables=options.by_variables,
        find_models=find_models,
    )
    guard.begin(scaling, options)
    _scalings.add(scaling)
    _set_hook()
    return scaling


def guard_half(
    model: torch.nn.Module,
    options: Options,
    scaling: ModelScaling | None = None,
    *,
    automatic: bool = False,
) -> ModelScaling:
    """Guards the steps of a model that trains half-precision weights.

    A model has one such scaling, whatever optimizers train it.

    Args:
        scaling: the scaling of a model that is captured; where its graphs would not
            pay, the model runs its own code as if it had none.  None where no graph of
            ours runs the model.
        automatic: whether the automatic mode found the model; no user named it.
    """
    known = (half_models.guards_around if automatic else half_models.guards)(model)
    if scaling is not None:
        if known is not None and known.low is None:
            for boundary in [each for each in boundaries() if known in each.scalings]:
                boundary.link(scaling)
                boundary.scalings.remove(known)
            _found.discard(known)
            end_scaling(known)
    elif known is not None:
        if not automatic:
            _found.discard(known)
            guard.begin(known, options)
        return known
    else:
        # The scaling lives as long as the model, and must not keep the model alive.
        ref = weakref.ref(model)

        def alive(_: ModelScaling) -> list[torch.nn.Module]:
            return [each for each in [ref()] if each is not None]

        label = class_name(model)
        scaling = new_scaling(options, NoLossScale(), label, alive, automatic=automatic)
        if automatic:
            _found.add(scaling)
    scaling.ledger.note_low()
    half_models.begin(model, scaling)
    return scaling


def unguard_half(model: torch.nn.Module) -> None:
    """Undoes `guard_half` for a model that is captured, or that the user has named."""
    scaling = half_models.guards(model)
    if scaling is not None and scaling.low is not None:
        half_models.end(model)
    elif scaling is not None and scaling not in _found:
        retire(scaling)


def end_scaling(scaling: ModelScaling) -> None:
    """Meets no optimizers for `scaling` any more; the last scaling takes the hook."""
    _scalings.discard(scaling)
    guard.end(scaling)
    half_models.end_all(scaling)
    _set_hook()


def retire(scaling: ModelScaling) -> None:
    """Ends `scaling`, with which graphs are not run any more."""
    end_scaling(scaling)
    for boundary in boundaries():
        if scaling in boundary.scalings:
            boundary.scalings.remove(scaling)
            if not boundary.scalings:
                detach(boundary)


def before_run(scaling: ModelScaling, leaves: Sequence[torch.Tensor]) -> None:
    """Called before each run of a graph that is scaled at its edge.

    Args:
        leaves: the tensors whose gradients the run fills.
    """
    ledger = scaling.ledger
    if ledger.foreign is None:
        ledger.foreign = False
        optimizers, scalers = compat.optimizers_and_scalers()
        if not scaling.asked:
            # One of them may be about to scale this model's loss.  The first gradients
            # of a loss that is scaled twice would overflow, so a backward looks at the
            # scalers again.
            ledger.note_scalers(scalers)
        ids = {id(leaf) for leaf in leaves}
        for optimizer in optimizers:
            groups = getattr(optimizer, "param_groups", ())
            if any(id(p) in ids for group in groups for p in group["params"]):
                attach(optimizer).link(scaling)
    if ledger.scalers:
        ledger.a_scaler_scales()
    BACKWARDS.settle(scaling)


# -- the first step of an optimizer that nobody named ----------------------------------


def expect_models(
    options: Options | None, hook: RemovableHandle | None = None
) -> Callable[..., Any] | None:
    """Has optimizers be met before there is any scaling, or no more.

    A closure may call a model for the first time inside a step, and half-precision
    weights get masters before their first step.

    Args:
        options: the options of the automatic mode; None where it ends.
        hook: a hook before every step that is there already; torch lets nobody
            register another while a step calls its hooks.

    Returns:
        What that hook is to call; None where we have a hook of our own.
    """
    _expecting[:] = [] if options is None else [options]
    taken = hook is not None and not _hook
    if hook is not None and taken:
        _hook.append(hook)
    _set_hook()
    if options is None or options.masters == "off":
        for boundary in list(_met_by_masters):
            _met_by_masters.discard(boundary)
            _take_masters(boundary)
            if not boundary.scalings:
                detach(boundary)
    for scaling in list(_found):
        if options is None:
            _found.discard(scaling)
            retire(scaling)
        else:
            guard.begin(scaling, options)
    if options is None:
        _searched.clear()
    return _before_step if taken else None


def _set_hook() -> None:
    """Registers the hook, or removes it, as need be."""
    needed = bool(_scalings) or bool(_expecting)
    if needed and not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))
    # Torch calls a global hook at each step of each optimizer, also of a process that
    # has converted nothing any more.
    elif not needed and _hook:
        _hook.pop().remove()


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Changed:
    """Called inside every step, with the optimizer itself as `args[0]`."""
    if torch.compiler.is_dynamo_compiling():  # a step the user compiles
        wanted = bool(_expecting) and _expecting[0].masters != "off"
        if wanted and not _has_masters(optimizer) and has_half(params_of(optimizer)):
            _say_compiled()
        name = type(optimizer).__name__
        if _is_whole(name):
            return None
        # No masters are made here: the compiler has looked at the weights already.
        return _in_python(optimizer, args, kwargs, known=True)
    known = boundary_of(optimizer) is not None
    if _expecting:
        take_on(optimizer)
    return _in_any_step(optimizer, args, kwargs, known)


def _in_any_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], known: bool
) -> _Changed:
    """Judges a step that has not been judged, and announces what it writes to.

    Args:
        known: whether the optimizer had a boundary before the step.
    """
    # Models that were garbage-collected, not reverted, have left the hook behind.
    if not _scalings and not (_expecting and closure_of(args[1:], kwargs)):
        return None
    # A plan steps weights without numbers, which no model here has: nothing is judged,
    # since reading a flag of theirs raises ("cannot be called on meta tensors").
    if not known and any(param.is_meta for param in params_of(optimizer)):
        return None
    engine = "" if known else foreign_engines.engine_stepping()
    if engine:
        log_once(logger, logging.INFO, f"autoamp: {engine}")
        before_write(params_of(optimizer))
        return None
    if not (known or _expecting):
        _share(optimizer)
    tell_of_uncalled(optimizer, _scalings)
    if compat.are_several() and not have_shaken_hands(optimizer):
        _shake_hands(optimizer)
    boundary = boundary_of(optimizer)
    judged_already = boundary is not None and boundary.inside
    changed = None if judged_already else _judge_begun(optimizer, args[1:], kwargs)
    if changed is None or changed[0][0] is optimizer:
        # Announced writes cost nothing; a write that meets a sentinel first copies the
        # whole weight to a new address.  The empty optimizer of a skipped step writes
        # nothing, so that copies and sentinels stay.
        before_write(params_of(optimizer))
    return changed


# Where the user compiles the step, the compiler is to leave this call alone.
_in_python: Callable[..., _Changed] = torch.compiler.disable(_in_any_step)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_whole(name: str) -> bool:
    """Whether a step is compiled as one graph, in which no Python of ours can stand."""
    _, may_break = compat.tracing_backend()
    if not may_break:
        log_once(
            logger,
            logging.WARNING,
            f"autoamp: a step of {name} is compiled with fullgraph=True, so that it "
            "cannot be skipped: a gradient that is not finite will be written, and "
            "half-precision weights get no fp32 masters. Compile the step without "
            "fullgraph, or take it outside of torch.compile",
        )
    return not may_break


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


def _judge_begun(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Changed:
    """Judges a step that has begun without the boundary's `step`.

    Returns:
        The changed arguments, with the optimizer, or None.
    """
    closure = closure_of(args, kwargs)
    writes = closure is not None and not closures.evaluates_first(optimizer)
    params = params_of(optimizer)
    if closure and not (writes and closures.has_gradients(optimizer)):
        # The whole first iteration of the model may be inside the closure.
        _, args, kwargs = evaluated(args, kwargs, params if writes else ())
    boundary = boundary_of(optimizer)
    if boundary is None:
        owners = _owners(optimizer, params)
        if not owners:
            return ((optimizer, *args), kwargs) if closure else None
        boundary = attach(optimizer)
        for scaling in owners:
            boundary.link(scaling)
    if not leaves_to_scaler(boundary):
        # LBFGS evaluates its closure many times: each evaluation is judged for itself.
        many = isinstance(optimizer, torch.optim.LBFGS)
        if not many and judge(boundary, begun=True)[0] is Way.SKIP:
            # A skipped step fires no hook, and this one has begun to fire them.
            _hold_hooks_once(optimizer)
            # A step that has begun cannot be stopped, but its arguments can be changed:
            # it steps an optimizer that holds no weights.
            return (_without_weights(optimizer), *args), kwargs
        if many or writes:
            args, kwargs = closures.first_step(boundary, args, kwargs)
    return (optimizer, *args), kwargs


def _owners(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> list[ModelScaling]:
    """The models for whose sake the steps of an optimizer are judged.

    These are the models that ranks agree about, whose weights or trained inputs the
    optimizer holds, and that have passed an overflow on to weights of no graph.
    """
    owners = owners_of(params, judged(_scalings)) + guard.guards_of(optimizer, params)
    by_id = {id(p): p for p in params}
    # Most runs share their leaves, and a bystander's every step asks.
    of_leaves = {id(run.leaves): run for run in BACKWARDS.runs}
    runs = [run for run in of_leaves.values() if run.leaves.are_among(by_id)]
    passed = [run for run in BACKWARDS.unread() if _passed_on(run)]
    grads = [p.grad for p in params if p.grad is not None] if passed else []
    if grads:
        flag = not_finite(grads)
        # A flag on a device is not read, since the host would wait.
        runs += passed if not free_to_read(flag) or bool(flag) else []
    owners += [run.scaling for run in runs if run.scaling in _scalings]
    return [*dict.fromkeys(owners)]


def _passed_on(run: GraphRun) -> bool:
    """Whether an overflow may have left a run for weights of other graphs, or none."""
    if not run.origin.computed or run.origin.graph() is None:
        return False
    # Another rank's run may have overflowed.
    flags = () if compat.are_several() else run.found_inf
    return not flags or any(not free_to_read(flag) or bool(flag) for flag in flags)


def _without_weights(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and settings that has nothing to step."""
    # The constructor would refuse an empty list of weights.
    empty: Any = object.__new__(type(optimizer))
    empty.__dict__.update(optimizer.__dict__)
    empty.param_groups = [{**g, "params": []} for g in optimizer.param_groups]
    return empty  # type: ignore[no-any-return]


def _hold_hooks_once(optimizer: Any) -> None:
    """Keeps the optimizer's own hooks from this one step, which is skipped."""
    before, after = compat.step_hooks(optimizer)
    held = dict(before)
    # Torch is about to read the hooks from this very dictionary, so it is emptied.
    before.clear()

    def restore(*_: Any) -> None:
        before.update(held)
        compat.set_hooks_after_step(optimizer, after)

    # Torch looks the hooks after a step up later, so the dictionary is replaced.
    only: OrderedDict[int, Callable[..., None]] = OrderedDict({0: restore})
    compat.set_hooks_after_step(optimizer, only)
