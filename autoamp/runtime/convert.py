"""`convert` and `revert`: mixed precision on a model's call path, in place.

The model stays the same object.  Its `forward` becomes an instance attribute that calls
a compiled entry *with the instance as an argument*, so deep copies run their own
weights; everything else about the model is untouched.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.dtypes import short_name
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.loss_scale import LossScale, NoLossScale, resolve_loss_scale
from autoamp.options import Options
from autoamp.runtime.attach import detach_from, listen, meet, stop_listening
from autoamp.runtime.calls import CompiledCall, disabled
from autoamp.runtime.eligible import choose_precision, own_precision, unsupported
from autoamp.runtime.engine import Engine, Skipped
from autoamp.runtime.forward import make_forward, plain_entry
from autoamp.runtime.loaded import own_loaded_weights
from autoamp.runtime.scaling import ModelScaling
from autoamp.runtime.warmup import capture_now

__all__ = ["Conversion", "conversion_of", "convert_model", "disabled", "revert_model"]

logger = logging.getLogger(__name__)

_STATE = "_autoamp"
_REPLICATE = "_replicate_for_data_parallel"
_PICKLE, _COPY = "__getstate__", "__deepcopy__"
_SCRIPT = "__prepare_scriptable__"
_OURS = (_STATE, _REPLICATE, _PICKLE, _COPY, _SCRIPT)
"""What stands in the `__dict__` of a converted model, besides `forward`."""


class Conversion:
    """What a converted model carries.

    Attributes:
        call: what its calls go through, shared by deep copies; None once it is
            reverted underneath a wrapper that somebody put over our `forward`.
        previous: the instance's own `forward` where somebody (accelerate, PEFT) had
            put one; it is called, not replaced.
        bound: the `forward` that was put on the model.
        declined: why the model was left as it is.
    """

    def __init__(
        self,
        call: CompiledCall | None = None,
        previous: Callable[..., Any] | None = None,
        bound: types.MethodType | None = None,
        declined: list[Skipped] | None = None,
    ) -> None:
        self.call = call
        self.previous = previous
        self.bound = bound
        self.declined = declined or []
        _CONVERSIONS.add(self)

    @property
    def engine(self) -> Engine | None:
        """What compiles the model's graphs and keeps their record; None if declined."""
        return self.call.engine if self.call is not None else None

    @property
    def options(self) -> Options | None:
        """What the model was converted with."""
        return self.call.engine.options if self.call is not None else None

    @property
    def skipped(self) -> list[Skipped]:
        """What was not converted, and why."""
        return self.call.engine.skipped if self.call is not None else self.declined

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        return Conversion(
            self.call,
            copy.deepcopy(self.previous, memo),
            copy.deepcopy(self.bound, memo),
        )


_CONVERSIONS: weakref.WeakSet[Conversion] = weakref.WeakSet()
"""Those of all models; deep copies share what their calls go through."""

_DECLINED = WeakIdKeyDictionary()
"""Models left as they are, to their record: nothing is written on the model itself."""


def convert_model(
    model: nn.Module,
    options: Options,
    example_inputs: tuple[Any, ...] | None = None,
    *,
    masters: bool = False,
) -> nn.Module:
    """Converts `model` in place; see `autoamp.convert`.

    Args:
        masters: what it has in half precision is trained with fp32 masters.

    Raises:
        UnsupportedModelError: not a module, or one that cannot be captured.
        OptionError: `example_inputs` is not a tuple.
    """
    model = _inside_wrappers(model)
    reason = unsupported(model)
    if reason is not None:
        raise UnsupportedModelError(reason)
    if example_inputs is not None and not isinstance(example_inputs, tuple):
        raise OptionError("example_inputs must be a tuple of the model's arguments")
    low, why_not = choose_precision(model, options)
    label = type(model).__name__
    own = own_precision(model) if masters else None
    notes = [] if own is None else [Skipped(label, _with_masters(own))]
    scale = resolve_loss_scale(options.loss_scale, _shortest(own, low))
    if low is None and own is not None and not isinstance(scale, NoLossScale):
        # For the scaling at its edge: it runs as it is.
        low, options = own, _runs_as_it_is(options, label)
    if low is None:
        if own is None:
            logger.warning("autoamp: %s stays in fp32: %s", label, why_not)
            notes = [Skipped(label, why_not)]
        else:
            logger.info("autoamp: %s %s", label, notes[0].why)
        revert_model(model, optimizers=own is None)
        _DECLINED[model] = Conversion(declined=notes)
        return model
    own_loaded_weights(model)
    state = model.__dict__.get(_STATE)
    fresh = not isinstance(state, Conversion)
    if not isinstance(state, Conversion):
        state = _install(model)
    before = state.call
    make_entry = functools.partial(plain_entry, type(model), state.previous is None)
    state.call = CompiledCall(make_entry, _engine(options, low, label, scale))
    state.call.engine.skipped += notes
    if example_inputs is not None:
        try:
            capture_now(model, example_inputs)
        except BaseException:
            state.call = before
            if fresh:
                revert_model(model)
            raise
    _DECLINED.pop(model, None)
    logger.debug("autoamp: %s will be converted to %s", label, short_name(low))
    return model


def _engine(
    options: Options, low: torch.dtype, label: str, loss_scale: LossScale
) -> Engine:
    engine = Engine(options, low, label, ModelScaling(loss_scale, label, meet))
    listen(engine)
    return engine


def _with_masters(own: torch.dtype) -> str:
    return (
        f"what arrived in {short_name(own)} runs in {short_name(own)}; its optimizer "
        "steps fp32 masters"
    )


def _shortest(own: torch.dtype | None, low: torch.dtype | None) -> torch.dtype:
    """That of the dtypes gradients flow in whose range is the shortest."""
    return torch.float16 if torch.float16 in (own, low) else torch.bfloat16


def _runs_as_it_is(options: Options, label: str) -> Options:
    """`options` under which nothing is lowered.

    Raises:
        UnsupportedModelError: a compiler differentiates the graph.
    """
    if options.backend != "eager":
        raise UnsupportedModelError(
            f"{label} arrives in half precision. What {options.backend} compiles gives "
            "its gradients in half precision too, where small ones are 0 once the loss "
            "scale is taken off; use backend='eager', or loss_scale='off'"
        )
    return options.replace(keep=("*",), do_no_harm=True)


def revert_model(model: nn.Module, *, optimizers: bool = True) -> nn.Module:
    """Puts the call path back as it was; a model that is not converted is left alone.

    Where somebody wrapped our `forward` since, their wrapper stays, and ours under it
    passes calls on unchanged.

    Args:
        optimizers: theirs go too, and with them the masters of what is half.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"revert() takes a torch.nn.Module, not {type(model).__name__}"
        )
    model = _inside_wrappers(model)
    if conversion_of(model) is not None and optimizers:
        detach_from(model)
    _DECLINED.pop(model, None)
    state = model.__dict__.get(_STATE)
    if not isinstance(state, Conversion):
        return model
    call, state.call = state.call, None
    if call is not None and all(each.call is not call for each in _CONVERSIONS):
        stop_listening(call.engine)
    if model.__dict__.get("forward") == state.bound:
        for name in (*_OURS, "forward"):
            model.__dict__.pop(name, None)
        if state.previous is not None:
            model.__dict__["forward"] = state.previous
    return model


def disown(model: nn.Module) -> None:
    """Takes away what a model has of another's conversion.

    `copy.__dict__.update(model.__dict__)` brings a `forward` bound to the original.
    """
    state = model.__dict__.get(_STATE)
    if not isinstance(state, Conversion) or state.bound is None:
        return
    if state.bound.__self__ is not model:
        plain = _without_ours(model.__dict__, model)
        model.__dict__.clear()
        model.__dict__.update(plain)


def models_of(engine: Engine) -> list[nn.Module]:
    """The models whose calls go through `engine`: one, and its deep copies."""
    found = [
        each.bound.__self__
        for each in list(_CONVERSIONS)
        if each.engine is engine and each.bound is not None
    ]
    return [model for model in found if isinstance(model, nn.Module)]


def conversion_of(model: Any) -> Conversion | None:
    """The conversion `model` carries, declined ones included, or None."""
    if not isinstance(model, nn.Module):
        return None
    model = _inside_wrappers(model)
    state = model.__dict__.get(_STATE)
    if not isinstance(state, Conversion) or state.call is None:
        state = _DECLINED.get(model)
    return state if isinstance(state, Conversion) else None


def _inside_wrappers(model: Any) -> Any:
    """The module that `DistributedDataParallel` or `DataParallel` calls, or `model`.

    Their own forward is no model: Dynamo steps aside from it.
    """
    while isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        model = model.module
    return model


def _install(model: nn.Module) -> Conversion:
    """Puts our `forward` on the instance; it passes calls on until it has a `call`."""
    existing = model.__dict__.get("forward")
    bound = types.MethodType(make_forward(type(model), existing), model)
    state = Conversion(None, existing, bound)
    model.__dict__[_STATE] = state
    model.__dict__["forward"] = bound
    model.__dict__[_REPLICATE] = types.MethodType(_replicate_for_data_parallel, model)
    model.__dict__[_PICKLE] = types.MethodType(__getstate__, model)
    model.__dict__[_COPY] = types.MethodType(__deepcopy__, model)
    model.__dict__[_SCRIPT] = types.MethodType(__prepare_scriptable__, model)
    return state


# The name is how pickle finds a bound method again.
def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """`nn.DataParallel`'s replica of a converted model, running its own weights.

    A replica is made by copying `__dict__`: its `forward` would be bound to the
    original.
    """
    replica: nn.Module = type(self)._replicate_for_data_parallel(self)
    state = self.__dict__[_STATE]
    if self.__dict__.get("forward") == state.bound:
        replica.__dict__["forward"] = types.MethodType(state.bound.__func__, replica)
    return replica


# These names, too, are how a copy of a bound method is found again.
def __getstate__(self: nn.Module) -> Any:  # noqa: N807
    """What is pickled, and shallowly copied: the model as it was before `convert`.

    So a checkpoint of a whole model loads where there is no autoamp, and a copy never
    runs the weights of the original.
    """
    engine = self.__dict__[_STATE].engine
    if engine is not None and not engine.automatic:
        logger.warning(
            "autoamp: a pickle or shallow copy of %s is made unconverted: it runs in "
            "fp32 until you call autoamp.convert(copy)",
            type(self).__name__,
        )
    state = _state_by_its_class(self)
    return _without_ours(state, self) if isinstance(state, dict) else state


def _state_by_its_class(model: nn.Module) -> Any:
    own: Any = type(model).__getstate__
    return own(model)


def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:  # noqa: N807
    """A deep copy is converted as well, and runs weights of its own."""
    own = getattr(type(self), _COPY, None)
    if own is not None:
        copied: nn.Module = own(self, memo)
        return copied
    other = type(self).__new__(type(self))
    memo[id(self)] = other
    other.__setstate__(copy.deepcopy(_state_by_its_class(self), memo))
    return other


def __prepare_scriptable__(self: nn.Module) -> nn.Module:  # noqa: N807
    """What `torch.jit.script` compiles: the model's own code, on the same weights."""
    plain = type(self).__new__(type(self))
    plain.__dict__.update(_without_ours(self.__dict__, self))
    return plain


def _without_ours(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    kept = {k: v for k, v in state.items() if k not in _OURS}
    conversion = model.__dict__.get(_STATE)
    if isinstance(conversion, Conversion) and kept.get("forward") == conversion.bound:
        del kept["forward"]
        if conversion.previous is not None:
            kept["forward"] = conversion.previous
    return kept
