"""`convert` and `revert`: mixed precision on a model's call path, in place.

A conversion is decided (`decide`), and then installed.

The model stays the same object.  Its `forward` becomes an instance attribute that calls
a compiled entry *with the instance as an argument*, so deep copies run their own
weights; everything else about the model is untouched.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.dtypes import UNSCALED, largest, short_name
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.messages import class_name, log_once
from autoamp.runtime.called_parts import left_alone, watch
from autoamp.runtime.conversion import (
    CONVERSIONS,
    DECLINED,
    REVERTED,
    Conversion,
    conversion_of,
    install,
    models_of,
    uninstall,
)
from autoamp.runtime.conversion_record import Record, Skipped
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
from autoamp.runtime.module_state import capture_now
from autoamp.runtime.program import STATE
from autoamp.training.attach import (
    attached,
    detach_from,
    end_scaling,
    guard_half,
    introduce,
    new_scaling,
    unguard_half,
)
from autoamp.training.masters import has_half
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.options import Options
from autoamp.training.scale import LossScale, NoLossScale, resolve_loss_scale
from autoamp.training.shards import SHARDED
from autoamp.training.uncalled import expect_calls
from autoamp.training.weight_copies import own_loaded_weights
from autoamp_said import logger_of

logger = logger_of(__name__)


@dataclass(frozen=True)
class Decision:
    """The decision on a model, made before anything of it is changed.

    Attributes:
        model: the model, inside all wrappers.
        options: the options, with what the model itself asks for.
        low: the compute dtype; None where the model is not converted.
        why_not: why it is not.
        scale: the loss scale to begin with.
        trains_half: whether the model has half-precision weights that are trained.
        notes: how a half-precision model is trained; empty for other models.
    """

    model: nn.Module
    options: Options
    low: torch.dtype | None
    why_not: str
    scale: LossScale
    trains_half: bool
    notes: tuple[Skipped, ...]

    @property
    def label(self) -> str:
        """The name of the model's class."""
        return class_name(self.model)


def convert_model(
    model: nn.Module,
    options: Options,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    example_inputs: tuple[Any, ...] | None = None,
    *,
    automatic: bool = False,
    on_capture: Callable[[Engine], None] | None = None,
) -> nn.Module:
    """Converts the model in place and takes its optimizers, both or neither.

    See `autoamp.convert`.

    Args:
        automatic: whether the automatic mode found the model; no user named it.
        on_capture: as for `Engine`.

    Raises:
        UnsupportedModelError: `model` is not a module, or cannot be captured.
        OptionError: `example_inputs`, or a pattern of `keep=`, cannot be used.
    """
    if example_inputs is not None and not isinstance(example_inputs, tuple):
        raise OptionError("example_inputs must be a tuple of the model's arguments")
    # Masters live beside an optimizer: without one nobody would step them.
    masters = bool(optimizers) and options.masters != "off"
    decided = decide(model, options, masters=masters)
    # An optimizer with a state that does not fit raises before the model is changed.
    with (
        attached(optimizers) as boundaries,
        _in_force(decided, automatic=automatic) as engine,
    ):
        scaling, trains_half = None, any(has_half(each.params) for each in boundaries)
        if engine is not None:
            scaling, engine.on_capture = engine.record.scaling, on_capture
            trains_half = decided.trains_half
            if example_inputs is not None:
                capture_now(decided.model, example_inputs)
        if trains_half:
            scaling = guard_half(decided.model, options, scaling)
        for boundary in boundaries:
            # With its wrapper: DDP says in which dtype it reduces gradients.
            introduce(boundary, model, options, scaling)
    return decided.model


def decide(model: nn.Module, options: Options, *, masters: bool = False) -> Decision:
    """Decides whether and how to convert a model, which is not changed.

    Args:
        masters: whether half-precision weights are trained with fp32 master weights.

    Raises:
        UnsupportedModelError: `model` is not a module, or cannot be captured; or its
            weights are half-precision ones that need a loss scale, and the backend is a
            compiler, which differentiates the graph itself.
        OptionError: a pattern of `keep=` cannot be used.
    """
    model = compat.inside_wrappers(model)
    if reason := unsupported(model, around=True):
        raise UnsupportedModelError(reason)
    low, why_not = choose_precision(model, options)
    own_dtype = own_precision(model) if masters else None
    options, label = for_model(model, options, low), class_name(model)
    trains_half = has_half(parameters_of(model))
    # Gradients have the dtype of their weights: the narrowest range decides.
    narrowest = min(filter(None, (own_dtype, low)), key=largest, default=UNSCALED)
    scale = resolve_loss_scale(options.loss_scale, narrowest)
    if low is None and own_dtype is not None and not isinstance(scale, NoLossScale):
        if options.backend != "eager":
            raise UnsupportedModelError(
                f"{label} has half-precision parameters. Graphs that {options.backend} "
                "compiles return half-precision gradients, in which small numbers "
                "become 0 when they are divided by the loss scale; use "
                f"{options.advice('backend', 'eager')}, or "
                f"{options.advice('loss_scale', 'off')}"
            )
        # The model is converted for loss scaling only: none of its ops is lowered.
        low, why_not = own_dtype, ""
        options = options.replace(keep=("*",), do_no_harm=True)
    notes: tuple[Skipped, ...] = ()
    if own_dtype is not None:
        kept = f"keeps its {short_name(own_dtype)} parameters"
        why = f"{kept}; its optimizer steps fp32 master weights"
        notes = (Skipped(label, why),)
    return Decision(model, options, low, why_not, scale, trains_half, notes)


@contextlib.contextmanager
def _in_force(decided: Decision, *, automatic: bool) -> Iterator[Engine | None]:
    """A region with the model as decided; a region that raises leaves it as it was.

    Yields the engine of the model's graphs, or None where the model is not converted.
    """
    model = decided.model
    if decided.low is None:
        _decline(decided, automatic=automatic)
        engine = before = None
    else:
        engine = _engine(decided, decided.low, automatic=automatic)
        state = _state_of(model)
        before = state.call
        state.call = Entry(engine, type(model), of_class=state.previous is None)
        # Before any graph is captured: a graph's copies are kept only of memory that
        # torch can watch.
        own_loaded_weights(model)
        watch(model)
    with contextlib.ExitStack() as undo:
        if before is None:
            undo.callback(revert_model, model)
        else:  # a model that was converted before keeps that conversion
            undo.callback(setattr, state, "call", before)
        yield engine
        undo.pop_all()
    if engine is not None:
        DECLINED.pop(model, None)
        low = short_name(engine.record.low)
        logger.debug("autoamp: %s will be converted to %s", decided.label, low)


def _decline(decided: Decision, *, automatic: bool) -> None:
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


def _engine(decided: Decision, low: torch.dtype, *, automatic: bool) -> Engine:
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


def _state_of(model: nn.Module) -> Conversion:
    """The state on a model; without a `call` if the model was not converted."""
    state = model.__dict__.get(STATE)
    if isinstance(state, Conversion):
        # Its `forward` was replaced, or it was captured as a part of another model.
        if state.bound is None or state.root is not None:
            revert_model(model, optimizers=False)
        else:
            _revert_parts(model)
            return state
    return install(model)


def _models_of(scaling: ModelScaling) -> list[nn.Module]:
    engines = {each.engine for each in CONVERSIONS if each.engine is not None}
    return [
        model
        for engine in engines
        if engine.record.scaling is scaling
        for model in models_of(engine)
    ]


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
    attributes = (
        compat.children_here(model).keys() | compat.parameters_here(model).keys()
    )
    methods: dict[str, None] = {}
    for base in type(model).__mro__:
        if base.__module__.partition(".")[0] == "torch":
            break
        for name, function in vars(base).items():
            if isinstance(function, types.FunctionType) and not name.startswith("__"):
                code = getattr(inspect.unwrap(function), "__code__", function.__code__)
                if name != "forward" and not attributes.isdisjoint(code.co_names):
                    methods[name] = None
    return [*methods]


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
    state, scaling = model.__dict__.get(STATE), None
    if isinstance(state, Conversion):
        _revert_parts(model)
    was_asked = conversion_of(model) is not None
    DECLINED.pop(model, None)
    if isinstance(state, Conversion):
        SHARDED.forget(model)
        call, state.call = state.call, None
        REVERTED[model] = True
        if call is not None and all(e.engine is not call.engine for e in CONVERSIONS):
            scaling = call.engine.record.scaling
        if state.bound is None or model.__dict__.get("forward") == state.bound:
            uninstall(model)
    if was_asked and optimizers:
        detach_from(model)
        unguard_half(model)
    if scaling is not None:
        end_scaling(scaling)
    return model


def _revert_parts(model: nn.Module) -> None:
    """Restores the modules in a converted model that were captured by themselves."""
    for part in left_alone(model):
        revert_model(part, optimizers=False)
