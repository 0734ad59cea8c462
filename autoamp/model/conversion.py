"""What a converted model carries, and what becomes of it in copies.

All of it stands in the instance's `__dict__`: the class, the parameters and the
`state_dict` are as they were.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.capture.alike import STATE
from autoamp.capture.engine import Engine
from autoamp.capture.record import Skipped
from autoamp.model.calls import CompiledCall
from autoamp.model.forward import MADE_HERE, forward_of, make_forward, make_method
from autoamp.model.methods import computing_methods
from autoamp.options import Options
from autoamp.plain import class_name

logger = logging.getLogger(__name__)

_REPLICATE = "_replicate_for_data_parallel"
_PICKLE, _REDUCE, _COPY = "__getstate__", "__reduce_ex__", "__deepcopy__"
_SCRIPT = "__prepare_scriptable__"
OURS = (STATE, _REPLICATE, _PICKLE, _REDUCE, _COPY, _SCRIPT)
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
        replaced: what the instance had of its own where ours stands now, by name.
        declined: why the model was left as it is.
    """

    def __init__(
        self,
        call: CompiledCall | None = None,
        replaced: dict[str, Any] | None = None,
        bound: types.MethodType | None = None,
        declined: list[Skipped] | None = None,
        methods: tuple[str, ...] = (),
    ) -> None:
        self.call = call
        self.methods = methods
        self.replaced = replaced or {}
        self.declined = declined or []
        self._bound: weakref.ref[types.MethodType] | None = None
        if bound is not None:
            self.bind(bound)
        CONVERSIONS.add(self)

    @property
    def previous(self) -> Callable[..., Any] | None:
        """The instance's own `forward` where somebody (accelerate, PEFT) had put one.

        It is called, not replaced.
        """
        return self.replaced.get("forward")

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
                conversion.engine.record.note(_REPLACED)

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
        return self.declined if self.call is None else self.call.engine.record.skipped

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        return Conversion(
            self.call,
            copy.deepcopy(self.replaced, memo),
            copy.deepcopy(self.bound, memo),
            methods=self.methods,
        )


CONVERSIONS: weakref.WeakSet[Conversion] = weakref.WeakSet()
"""Those of all models; deep copies share what their calls go through."""

DECLINED = WeakIdKeyDictionary()
"""Models left as they are, to their record: nothing is written on the model itself."""


def install(model: nn.Module) -> Conversion:
    """Puts our `forward` on the instance; it passes calls on until it has a `call`."""
    own = model.__dict__
    replaced = {name: own[name] for name in ("forward", *OURS) if name in own}
    bound = types.MethodType(make_forward(type(model), replaced.get("forward")), model)
    methods = [name for name in computing_methods(model) if name not in own]
    state = Conversion(None, replaced, bound, methods=tuple(methods))
    own[STATE] = state
    own["forward"] = bound
    for name in methods:
        own[name] = types.MethodType(make_method(type(model), name), model)
    for method in (_replicate_for_data_parallel, __getstate__, __deepcopy__):
        own[method.__name__] = types.MethodType(method, model)
    own[_SCRIPT] = types.MethodType(__prepare_scriptable__, model)
    if _reduces_itself(model):
        own[_REDUCE] = types.MethodType(__reduce_ex__, model)
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
    _say_unconverted(self)
    state = _state_by_its_class(self)
    return without_ours(state, self) if isinstance(state, dict) else state


def _say_unconverted(model: nn.Module) -> None:
    engine = model.__dict__[STATE].engine
    if engine is not None and not engine.record.scaling.automatic:
        logger.warning(
            "autoamp: a pickle or shallow copy of %s is made unconverted: it runs in "
            "fp32 until you call autoamp.convert(copy)",
            class_name(model),
        )


def _state_by_its_class(model: nn.Module) -> Any:
    own: Any = type(model).__getstate__
    return own(model)


def _reduces_itself(model: nn.Module) -> bool:
    """Whether the class, or the instance, says itself how it is pickled."""
    kind: Any = type(model)
    default = kind.__reduce__ is object.__reduce__
    return (
        not default
        or kind.__reduce_ex__ is not object.__reduce_ex__
        or _REDUCE in model.__dict__
    )


def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
    """The same for a class that says itself how it is pickled, such as GraphModule."""
    _say_unconverted(self)
    with _as_it_was(self):
        own: Any = self.__reduce_ex__
        return _replaced(own(protocol), self.__dict__, dict(self.__dict__))


def _replaced(value: Any, part: Any, by: Any) -> Any:
    """`value`, which is or holds `part` in tuples, with something else for it."""
    if value is part:
        return by
    if type(value) is tuple:
        return tuple(_replaced(each, part, by) for each in value)
    return value


def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> Any:  # noqa: N807
    """A deep copy is converted as well, and runs weights of its own."""
    if getattr(type(self), _COPY, None) or _COPY in self.__dict__[STATE].replaced:
        return _copied_by_itself(self, memo)
    other = type(self).__new__(type(self))
    memo[id(self)] = other
    other.__setstate__(copy.deepcopy(_state_by_its_class(self), memo))
    return other


def _copied_by_itself(model: nn.Module, memo: dict[int, Any]) -> Any:
    """A copy made by code of the model's own, which is to see nothing of ours.

    It may copy the `__dict__`, and with it a `forward` that runs the original.
    """
    state: Conversion = model.__dict__[STATE]
    with _as_it_was(model):
        own: Any = model.__deepcopy__
        made = own(memo)
    if made is model or not isinstance(made, nn.Module) or state.call is None:
        return made
    new = install(made)
    new.call = state.call
    of_class = new.previous is None
    if type(made) is not type(model) or of_class != (state.previous is None):
        forward = forward_of(type(made), of_class)
        new.call = CompiledCall(forward, state.call.engine)
    return made


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """A region in which the instance is what it was before `install`."""
    converted = dict(model.__dict__)
    uninstall(model)
    plain = dict(model.__dict__)
    try:
        yield
    finally:
        ours = {k: v for k, v in converted.items() if plain.get(k) is not v}
        model.__dict__.update(ours)


def __prepare_scriptable__(self: nn.Module) -> nn.Module:  # noqa: N807
    """What `torch.jit.script` compiles: the model's own code, on the same weights."""
    plain = type(self).__new__(type(self))
    plain.__dict__.update(without_ours(self.__dict__, self))
    return plain


def without_ours(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A copy of `state`, the `__dict__` of `model`, as it was before `install`."""
    kept = {k: v for k, v in state.items() if k not in OURS}
    conversion = model.__dict__.get(STATE)
    if not isinstance(conversion, Conversion):
        return kept
    kept |= {k: v for k, v in conversion.replaced.items() if k in OURS}
    if conversion.bound is None:
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
