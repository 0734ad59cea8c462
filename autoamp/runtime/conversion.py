"""What a converted model carries, and what becomes of it in copies.

All of it stands in the instance's `__dict__`: the class, the parameters and the
`state_dict` are as they were.
"""

from __future__ import annotations

import copy
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.options import Options
from autoamp.plain import class_name
from autoamp.runtime.calls import CompiledCall
from autoamp.runtime.captured import Skipped
from autoamp.runtime.engine import Engine
from autoamp.runtime.forward import MADE_HERE, make_forward, make_method
from autoamp.runtime.methods import computing_methods

logger = logging.getLogger(__name__)

STATE = "_autoamp"
_REPLICATE = "_replicate_for_data_parallel"
_PICKLE, _COPY = "__getstate__", "__deepcopy__"
_SCRIPT = "__prepare_scriptable__"
OURS = (STATE, _REPLICATE, _PICKLE, _COPY, _SCRIPT)
"""What stands in the `__dict__` of a converted model, besides `forward`."""


_REPLACED = (
    "its forward was replaced or deleted after it was converted, so that calls run in "
    "fp32; call autoamp.convert(model) again to convert the new one"
)


class Conversion:
    """What a converted model carries.

    Attributes:
        call: what its calls go through, shared by deep copies; None once it is
            reverted underneath a wrapper that somebody put over our `forward`.
        methods: those besides `forward` that are ours on the instance, by name.
        previous: the instance's own `forward` where somebody (accelerate, PEFT) had
            put one; it is called, not replaced.
        declined: why the model was left as it is.
    """

    def __init__(
        self,
        call: CompiledCall | None = None,
        previous: Callable[..., Any] | None = None,
        bound: types.MethodType | None = None,
        declined: list[Skipped] | None = None,
        methods: tuple[str, ...] = (),
    ) -> None:
        self.call = call
        self.methods = methods
        self.previous = previous
        self.declined = declined or []
        self._bound: weakref.ref[types.MethodType] | None = None
        if bound is not None:
            self.bind(bound)
        CONVERSIONS.add(self)

    @property
    def bound(self) -> types.MethodType | None:
        """The `forward` that was put on the model; None once nobody holds it."""
        return self._bound() if self._bound is not None else None

    def bind(self, bound: types.MethodType) -> None:
        """Notes the model's `forward`, which the model alone is to hold.

        Whoever replaces it without keeping it, `model.forward = other`, has taken the
        model's calls away from us, and this is the only sign of it.
        """
        this = weakref.ref(self)

        def gone(_: weakref.ref[types.MethodType]) -> None:
            conversion = this()
            if conversion is not None and conversion.engine is not None:
                conversion.engine.note(_REPLACED)

        self._bound = weakref.ref(bound, gone)

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
            methods=self.methods,
        )


CONVERSIONS: weakref.WeakSet[Conversion] = weakref.WeakSet()
"""Those of all models; deep copies share what their calls go through."""

DECLINED = WeakIdKeyDictionary()
"""Models left as they are, to their record: nothing is written on the model itself."""


def install(model: nn.Module) -> Conversion:
    """Puts our `forward` on the instance; it passes calls on until it has a `call`."""
    existing = model.__dict__.get("forward")
    bound = types.MethodType(make_forward(type(model), existing), model)
    methods = [n for n in computing_methods(model) if n not in model.__dict__]
    state = Conversion(None, existing, bound, methods=tuple(methods))
    model.__dict__[STATE] = state
    model.__dict__["forward"] = bound
    for name in methods:
        model.__dict__[name] = types.MethodType(make_method(type(model), name), model)
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
    state = self.__dict__[STATE]
    bound = state.bound
    if bound is not None and self.__dict__.get("forward") == bound:
        replica.__dict__["forward"] = types.MethodType(bound.__func__, replica)
    for name in _own_methods(self.__dict__, state):
        method = self.__dict__[name].__func__
        replica.__dict__[name] = types.MethodType(method, replica)
    return replica


def _own_methods(attributes: dict[str, Any], state: Conversion) -> list[str]:
    """Our methods in a model's `__dict__`; the user may have put others there."""
    return [n for n in state.methods if getattr(attributes.get(n), MADE_HERE, False)]


# These names, too, are how a copy of a bound method is found again.
def __getstate__(self: nn.Module) -> Any:  # noqa: N807
    """What is pickled, and shallowly copied: the model as it was before `convert`.

    So a checkpoint of a whole model loads where there is no autoamp, and a copy never
    runs the weights of the original.
    """
    engine = self.__dict__[STATE].engine
    if engine is not None and not engine.scaling.automatic:
        logger.warning(
            "autoamp: a pickle or shallow copy of %s is made unconverted: it runs in "
            "fp32 until you call autoamp.convert(copy)",
            class_name(self),
        )
    state = _state_by_its_class(self)
    return without_ours(state, self) if isinstance(state, dict) else state


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
    plain.__dict__.update(without_ours(self.__dict__, self))
    return plain


def without_ours(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A copy of `state`, the `__dict__` of `model`, as it was before `install`."""
    kept = {k: v for k, v in state.items() if k not in OURS}
    conversion = model.__dict__.get(STATE)
    if not isinstance(conversion, Conversion) or conversion.bound is None:
        return kept
    for name in _own_methods(kept, conversion):
        del kept[name]
    if kept.get("forward") == conversion.bound:
        del kept["forward"]
        if conversion.previous is not None:
            kept["forward"] = conversion.previous
    return kept


def uninstall(model: nn.Module) -> None:
    """Takes away all that `install` has put on the instance."""
    plain = without_ours(model.__dict__, model)
    model.__dict__.clear()
    model.__dict__.update(plain)


def disown(model: nn.Module) -> None:
    """Takes away what a model has of another's conversion.

    `copy.__dict__.update(model.__dict__)` brings a `forward` bound to the original.
    """
    state = model.__dict__.get(STATE)
    bound = state.bound if isinstance(state, Conversion) else None
    if bound is not None and bound.__self__ is not model:
        uninstall(model)


def models_of(engine: Engine) -> list[nn.Module]:
    """The models whose calls go through `engine`: one, and its deep copies."""
    bounds = [each.bound for each in list(CONVERSIONS) if each.engine is engine]
    found = [bound.__self__ for bound in bounds if bound is not None]
    return [model for model in found if isinstance(model, nn.Module)]


def conversion_of(model: Any) -> Conversion | None:
    """The conversion `model` carries, declined ones included, or None."""
    if not isinstance(model, nn.Module):
        return None
    model = inside_wrappers(model)
    state = model.__dict__.get(STATE)
    if not isinstance(state, Conversion) or state.call is None:
        state = DECLINED.get(model)
    return state if isinstance(state, Conversion) else None


def inside_wrappers(model: Any) -> Any:
    """The module that `DistributedDataParallel` or `DataParallel` calls, or `model`.

    Their own forward is no model: Dynamo steps aside from it.
    """
    while isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        model = model.module
    return model
