"""`convert` and `revert`: mixed precision on a model's call path, in place.

A conversion is decided (`decide`), and then installed.

The model stays the same object.  Its `forward` becomes an instance attribute that calls
a compiled entry *with the instance as an argument*, so deep copies run their own
weights; everything else about the model is untouched.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.dtypes import UNSCALED, largest, short_name
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.messages import class_name, log_once
from autoamp.runtime.children import left_alone, watch
from autoamp.runtime.conversion import (
    CONVERSIONS,
    DECLINED,
    Conversion,
    conversion_of,
    install,
    models_of,
    uninstall,
)
from autoamp.runtime.eligible import (
    NAME_IT,
    choose_precision,
    for_model,
    not_converted,
    own_precision,
    parameters_of,
    unsupported,
)
from autoamp.runtime.engine import Engine
from autoamp.runtime.entry import Entry
from autoamp.runtime.kept import capture_now
from autoamp.runtime.program import STATE
from autoamp.runtime.record import Record, Skipped
from autoamp.training import foreign
from autoamp.training.attach import (
    attached,
    detach_from,
    end_scaling,
    guard_captured,
    guard_half,
    introduce,
    new_scaling,
    unguard_half,
)
from autoamp.training.masters import has_half
from autoamp.training.options import Options
from autoamp.training.scale import LossScale, NoLossScale, resolve_loss_scale
from autoamp.training.scaling import ModelScaling
from autoamp.training.shards import SHARDED
from autoamp.training.uncalled import expect_calls
from autoamp.training.weight_copies import own_loaded_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """The decision on a model, made before anything of it is changed.

    Attributes:
        model: the model, inside all wrappers.
        options: the options, with what the model itself asks for.
        low: the compute dtype; None where the model is not converted.
        why_not: why it is not.
        scale: the loss scale to begin with.
        notes: how a half-precision model is trained; empty for other models.
    """

    model: nn.Module
    options: Options
    low: torch.dtype | None
    why_not: str
    scale: LossScale
    notes: tuple[Skipped, ...]

    @property
    def label(self) -> str:
        """The name of the model's class."""
        return class_name(self.model)


def convert_model(
    model: nn.Module,
    options: Options,
    example_inputs: tuple[Any, ...] | None = None,
    *,
    masters: bool = False,
    automatic: bool = False,
    on_capture: Callable[[Engine], None] | None = None,
) -> nn.Module:
    """Converts `model` in place; see `autoamp.convert`.

    Args:
        masters: whether half-precision parameters are trained with fp32 master weights.
        automatic: whether the automatic mode found the model; no user named it.
        on_capture: as for `Engine`.

    Raises:
        UnsupportedModelError: `model` is not a module, or cannot be captured.
        OptionError: `example_inputs`, or a pattern of `keep=`, cannot be used.
    """
    if example_inputs is not None and not isinstance(example_inputs, tuple):
        raise OptionError("example_inputs must be a tuple of the model's arguments")
    decided = decide(model, options, masters=masters)
    if decided.low is None:
        _decline(decided, automatic)
    else:
        engine = _engine(decided, decided.low, automatic)
        engine.on_capture = on_capture
        _install(decided, engine, example_inputs)
        if has_half(parameters_of(decided.model)):
            guard_captured(decided.model, engine.record.scaling)
    return decided.model


def convert_for_training(
    model: nn.Module,
    options: Options,
    optimizers: Sequence[torch.optim.Optimizer],
    example_inputs: tuple[Any, ...] | None,
) -> None:
    """Converts the model and takes its optimizers, both or neither."""
    fresh = conversion_of(model) is None
    # The boundaries come first: an optimizer that was loaded with a state that does not
    # fit raises before anything of the model is changed.
    with attached(optimizers) as boundaries:
        # Masters live beside an optimizer: without one nobody would step them.
        masters = bool(optimizers) and options.masters != "off"
        convert_model(model, options, example_inputs, masters=masters)
        state = conversion_of(model)
        engine = None if state is None else state.engine
        scaling = None if engine is None else engine.record.scaling
        try:
            for boundary in boundaries:
                introduce(boundary, model, options, scaling)
        except BaseException:  # such as a loaded state that does not fit
            if fresh:
                revert_model(model)
            raise


def decide(model: nn.Module, options: Options, *, masters: bool = False) -> Decision:
    """Decides whether and how to convert a model, which is not changed.

    Raises:
        UnsupportedModelError: `model` is not a module, or cannot be captured.
        OptionError: a pattern of `keep=` cannot be used.
    """
    model = compat.inside_wrappers(model)
    reason = unsupported(model)
    # This is a search through all objects of the process, and comes last.
    if not reason and (engine := foreign.engine_around(model)):
        reason = f"{class_name(model)} cannot be converted. {engine}"
    if reason:
        raise UnsupportedModelError(reason)
    low, why_not = choose_precision(model, options)
    own = own_precision(model) if masters else None
    options, label = for_model(model, options, low), class_name(model)
    # Gradients have the dtype of their weights: the narrowest range decides.
    narrowest = min(filter(None, (own, low)), key=largest, default=UNSCALED)
    scale = resolve_loss_scale(options.loss_scale, narrowest)
    if low is None and own is not None and not isinstance(scale, NoLossScale):
        # The model is converted for loss scaling only: none of its ops is lowered.
        low, why_not, options = own, "", _runs_as_it_is(options, label)
    notes: tuple[Skipped, ...] = ()
    if own is not None:
        kept = f"keeps its {short_name(own)} parameters"
        why = f"{kept}; its optimizer steps fp32 master weights"
        notes = (Skipped(label, why),)
    return Decision(model, options, low, why_not, scale, notes)


def _engine(decided: Decision, low: torch.dtype, automatic: bool) -> Engine:
    """The engine of a model's graphs, with the record and the loss scaling."""
    options, label = decided.options, decided.label
    scaling = new_scaling(
        options,
        decided.scale,
        label,
        _models_of,
        low=low,
        automatic=automatic,
    )
    if not (automatic or decided.notes):
        expect_calls(scaling, _what_is_captured, strict=options.strict)
    record = Record(label, low, scaling, skipped=[*decided.notes])
    return Engine(options, record)


def _install(
    decided: Decision, engine: Engine, example_inputs: tuple[Any, ...] | None
) -> None:
    """Has the calls of the model run under `engine`; changes nothing if it raises."""
    model = decided.model
    state, fresh = _state_of(model)
    before = state.call
    state.call = Entry(engine, type(model), of_class=state.previous is None)
    # Before any graph is captured: a graph's copies are kept only of memory that torch
    # can watch.
    own_loaded_weights(model)
    watch(model)
    if example_inputs is not None:
        try:
            capture_now(model, example_inputs)
        except BaseException:
            state.call = before
            # A model that was converted before keeps that conversion.
            if fresh:
                revert_model(model)
            raise
    DECLINED.pop(model, None)
    low = short_name(engine.record.low)
    logger.debug("autoamp: %s will be converted to %s", decided.label, low)


def _state_of(model: nn.Module) -> tuple[Conversion, bool]:
    """The state on a model, and whether it is new: the model was not converted."""
    state = model.__dict__.get(STATE)
    if isinstance(state, Conversion):
        # Its `forward` was replaced, or it was captured as a part of another model.
        if state.bound is None or state.root is not None:
            revert_model(model, optimizers=False)
        else:
            _revert_parts(model)
            return state, False
    return install(model), True


def _decline(decided: Decision, automatic: bool) -> None:
    """Logs why a model is not converted, and reverts an earlier conversion."""
    model, label, notes = decided.model, decided.label, [*decided.notes]
    if notes:
        logger.info("autoamp: %s %s", label, notes[0].why)
    else:
        text = f"autoamp: {label} {not_converted(decided.why_not)}"
        level = logging.WARNING
        if automatic and NAME_IT in text:  # its optimizer is found, and then said
            text, level = text.replace(NAME_IT, ""), logging.INFO
        log_once(logger, level, text, of=model)
    revert_model(model, optimizers=not notes)
    DECLINED[model] = Conversion(declined=notes or [Skipped(label, decided.why_not)])
    # Before its first call: its first step may be skipped, too.
    if automatic and has_half(parameters_of(model)):
        guard_half(model, decided.options, automatic=True)


def _models_of(scaling: ModelScaling) -> list[nn.Module]:
    return [model for each in _engines_of(scaling) for model in models_of(each)]


def _what_is_captured(scaling: ModelScaling) -> str:
    """Says which calls of a model are captured, and which code runs past them."""
    model = scaling.models[0]
    past = [f"{scaling.label}.{name}" for name in _methods_past(model)]
    where = f"such as {', '.join(past)} may do" if past else "as the script does"
    return (
        "Captured are calls of the model and of the modules in it, not code that "
        f"computes with its weights in another way, {where}, and not parts of it "
        "inside the user's own torch.compile. Call the model or its modules; convert "
        "it after modules or its forward were exchanged, and before torch.compile"
    )


def _methods_past(model: nn.Module) -> list[str]:
    """The methods besides `forward` that use the model's children or weights."""
    held = compat.children_here(model).keys() | compat.parameters_here(model).keys()
    found: dict[str, None] = {}
    for base in type(model).__mro__:
        if base.__module__.partition(".")[0] == "torch":
            break
        for name, function in vars(base).items():
            if isinstance(function, types.FunctionType) and not name.startswith("__"):
                code = getattr(inspect.unwrap(function), "__code__", function.__code__)
                if name != "forward" and not held.isdisjoint(code.co_names):
                    found[name] = None
    return [*found]


def _engines_of(scaling: ModelScaling) -> list[Engine]:
    engines = {each.engine for each in CONVERSIONS if each.engine is not None}
    return [each for each in engines if each.record.scaling is scaling]


def _runs_as_it_is(options: Options, label: str) -> Options:
    """`options`, changed so that no op is lowered.

    Raises:
        UnsupportedModelError: the backend is a compiler, which differentiates the graph
            itself.
    """
    if options.backend != "eager":
        raise UnsupportedModelError(
            f"{label} has half-precision parameters. Graphs that {options.backend} "
            "compiles return half-precision gradients, in which small numbers become 0 "
            "when they are divided by the loss scale; use "
            f"{options.advice('backend', 'eager')}, or "
            f"{options.advice('loss_scale', 'off')}"
        )
    return options.replace(keep=("*",), do_no_harm=True)


def revert_model(model: nn.Module, *, optimizers: bool = True) -> nn.Module:
    """Restores the call path of a model; a model that is not converted is left alone.

    If the user has wrapped our `forward`, the wrapper stays, and our `forward` inside
    it passes calls on to the model's own code.

    Args:
        optimizers: whether the model's optimizers are reverted too, which removes the
            master weights of half-precision parameters.

    Raises:
        UnsupportedModelError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"revert() takes a torch.nn.Module, not {type(model).__name__}"
        )
    model = compat.inside_wrappers(model)
    if conversion_of(model) is not None and optimizers:
        detach_from(model)
        unguard_half(model)
    DECLINED.pop(model, None)
    state = model.__dict__.get(STATE)
    if not isinstance(state, Conversion):
        return model
    _revert_parts(model)
    SHARDED.forget(model)
    call, state.call = state.call, None
    if call is not None and all(e.engine is not call.engine for e in CONVERSIONS):
        end_scaling(call.engine.record.scaling)
    if state.bound is None or model.__dict__.get("forward") == state.bound:
        uninstall(model)
    return model


def _revert_parts(model: nn.Module) -> None:
    """Restores the modules in a converted model that were captured by themselves."""
    for part in left_alone(model):
        revert_model(part, optimizers=False)
