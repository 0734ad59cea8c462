"""The attributes that `convert` puts on a model, and the state that they share.

All of it stands in the instance's `__dict__`.  The class, the parameters and the
`state_dict` are unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.messages import class_name
from autoamp.runtime.conversion_record import Skipped
from autoamp.runtime.engine import Engine
from autoamp.runtime.entry import Entry
from autoamp.runtime.forward import make_forward
from autoamp.runtime.program import STATE
from autoamp_said import logger_of

logger = logger_of(__name__)

REPLICATE = "_replicate_for_data_parallel"
PICKLE, REDUCE, COPY = "__getstate__", "__reduce_ex__", "__deepcopy__"
SCRIPT = "__prepare_scriptable__"
SHOWN = "extra_repr"
OUR_ATTRIBUTES = (STATE, REPLICATE, PICKLE, REDUCE, COPY, SCRIPT)
"""The names we set in the `__dict__` of a model, besides `forward` and `extra_repr`."""

REPLACED = (
    "its forward was replaced or deleted after it was converted, and calls run in "
    "fp32; call autoamp.convert(model) again to convert the new forward"
)


class Conversion:
    """The state of one converted model, or of a model that was not converted.

    Attributes:
        call: the entry that the model's calls go through, shared by deep copies; None
            if the model was not converted, or was reverted while a wrapper of the
            user's still held our `forward`.
        replaced: the instance's own attributes that ours have replaced, by name.
        declined: why the model was not converted.
        watch: hears of the calls of modules in the model (`called_parts.py`), or None.
    """

    def __init__(
        self,
        call: Entry | None = None,
        replaced: dict[str, Any] | None = None,
        bound: types.MethodType | None = None,
        declined: list[Skipped] | None = None,
    ) -> None:
        self.call = call
        self.replaced = replaced or {}
        self.declined = declined or []
        self.watch: Any = None
        self._root: weakref.ref[nn.Module] | None = None
        self._bound: weakref.ref[types.MethodType] | None = None
        if bound is not None:
            self.bind(bound)
        CONVERSIONS.add(self)

    @property
    def previous(self) -> Callable[..., Any] | None:
        """The `forward` that another library (accelerate, PEFT) put on the instance.

        Our `forward` calls it.  None where the instance had no `forward` of its own.
        """
        return self.replaced.get("forward")

    @property
    def bound(self) -> types.MethodType | None:
        """Our `forward` on the model; None once it is freed."""
        return self._bound() if self._bound is not None else None

    def bind(self, bound: types.MethodType) -> None:
        """Notes our `forward` by a weak reference, since only the model may hold it.

        An assignment `model.forward = other` takes the model's calls away from us, and
        the only sign of the assignment is that our `forward` is freed.  Whether a call
        comes past us then, the watch hears: a mock may stand there for a moment.
        """
        this, model = weakref.ref(self), weakref.ref(bound.__self__)

        def gone(_: weakref.ref[types.MethodType]) -> None:
            conversion, owner = this(), model()
            if owner is None:  # it is freed, with all that it holds
                return
            if conversion is not None and conversion.engine is not None:
                root = conversion.root
                top = conversion if root is None else root.__dict__.get(STATE)
                watch = getattr(top, "watch", None)
                if watch is not None:
                    watch.again(owner)

        self._bound = weakref.ref(bound, gone)

    @property
    def root(self) -> nn.Module | None:
        """The converted model that the model is a part of; None for other models."""
        return self._root() if self._root is not None else None

    @root.setter
    def root(self, model: nn.Module | None) -> None:
        self._root = None if model is None else weakref.ref(model)

    @property
    def model(self) -> nn.Module | None:
        """The model whose `forward` is ours; None once it has another."""
        bound = self.bound
        model = None if bound is None else bound.__self__
        return model if isinstance(model, nn.Module) else None

    @property
    def engine(self) -> Engine | None:
        """The engine of the model's graphs and their record; None if declined."""
        return self.call.engine if self.call is not None else None

    @property
    def skipped(self) -> list[Skipped]:
        """The parts that were not converted, with the reasons."""
        return self.declined if self.call is None else self.call.engine.record.skipped

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        copied = Conversion(
            self.call,
            copy.deepcopy(self.replaced, memo),
            copy.deepcopy(self.bound, memo),
        )
        if self.root is not None:
            copied.root = memo.get(id(self.root))
        return copied


CONVERSIONS: weakref.WeakSet[Conversion] = weakref.WeakSet()
"""The conversions of all models; a model's deep copies share its `call`."""

REVERTED = WeakIdKeyDictionary()
"""The models that were converted once, and that were reverted."""

DECLINED = WeakIdKeyDictionary()
"""Maps models that were not converted to their state, which is not written on them."""


def without_ours(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A copy of `state`, the `__dict__` of `model`, as it was before `install`."""
    kept = {k: v for k, v in state.items() if k not in OUR_ATTRIBUTES}
    conversion = model.__dict__.get(STATE)
    if not isinstance(conversion, Conversion):
        return kept
    kept |= {k: v for k, v in conversion.replaced.items() if k in OUR_ATTRIBUTES}
    if _shows(kept):
        del kept[SHOWN]
    if conversion.bound is not None and kept.get("forward") == conversion.bound:
        del kept["forward"]
        if conversion.previous is not None:
            kept["forward"] = conversion.previous
    return kept


def uninstall(model: nn.Module) -> None:
    """Takes everything that `install` has put on the instance away again."""
    plain = without_ours(model.__dict__, model)
    model.__dict__.clear()
    model.__dict__.update(plain)


def disown(model: nn.Module) -> None:
    """Takes away from a model the conversion of another model.

    `copy.__dict__.update(model.__dict__)` gives the copy a `forward` that is bound to
    the original.
    """
    state = model.__dict__.get(STATE)
    bound = state.bound if isinstance(state, Conversion) else None
    if bound is not None and bound.__self__ is not model:
        uninstall(model)


def models_of(engine: Engine) -> list[nn.Module]:
    """The models whose calls go through `engine`: one model and its deep copies."""
    states = [each for each in list(CONVERSIONS) if each.engine is engine]
    models = [each.model for each in states if each.root is None]
    return [model for model in models if model is not None]


def conversion_of(model: Any) -> Conversion | None:
    """The state of `model`, even if it was not converted; None if nobody tried."""
    if not isinstance(model, nn.Module):
        return None
    model = compat.inside_wrappers(model)
    state = model.__dict__.get(STATE)
    if not isinstance(state, Conversion) or state.call is None:
        state = DECLINED.get(model) if DECLINED else None
    return state if isinstance(state, Conversion) else None


def install(model: nn.Module) -> Conversion:
    """Puts our methods on the instance.

    The methods call the model's own code until `Conversion.call` is set.
    """
    attributes = model.__dict__
    replaced = {
        name: attributes[name]
        for name in ("forward", *OUR_ATTRIBUTES)
        if name in attributes
    }
    bound = types.MethodType(make_forward(type(model), replaced.get("forward")), model)
    state = Conversion(None, replaced, bound)
    attributes[STATE] = state
    attributes["forward"] = bound
    for method in (_replicate_for_data_parallel, __getstate__, __deepcopy__):
        attributes[method.__name__] = types.MethodType(method, model)
    attributes[SCRIPT] = types.MethodType(__prepare_scriptable__, model)
    if SHOWN not in attributes:
        attributes[SHOWN] = types.MethodType(extra_repr, model)
    # The class, or the instance, may have pickling methods of its own.
    kind: Any = type(model)
    reduces_itself = (
        kind.__reduce__ is not object.__reduce__
        or kind.__reduce_ex__ is not object.__reduce_ex__
    )
    if reduces_itself or REDUCE in attributes:
        attributes[REDUCE] = types.MethodType(__reduce_ex__, model)
    return state


def extra_repr(self: nn.Module) -> str:
    """The line of `print(model)`, which says that the model is converted."""
    shown = type(self).extra_repr(self)
    state = conversion_of(self)
    is_part = state is not None and state.root is not None  # its root says so
    if state is None or state.engine is None or state.bound is None or is_part:
        return shown
    line = f"converted by autoamp: {short_name(state.engine.record.low)}"
    if not shown:
        return line
    return f"{shown}\n{line}" if "\n" in shown else f"{shown}, {line}"


def _shows(attributes: dict[str, Any]) -> bool:
    """Whether our `extra_repr` is in a model's `__dict__`."""
    return getattr(attributes.get(SHOWN), "__func__", None) is extra_repr


# Pickle finds a bound method again by this name.
def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """`nn.DataParallel`'s replica of a converted model, running its own weights.

    `nn.DataParallel` copies `__dict__`, so the replica's `forward` would be bound to
    the original.
    """
    replica: nn.Module = type(self)._replicate_for_data_parallel(self)
    state = self.__dict__[STATE]
    bound = state.bound
    if bound is not None and self.__dict__.get("forward") == bound:
        # Bound to the original it would run the weights of device 0 on each device.
        replica.__dict__["forward"] = types.MethodType(bound.__func__, replica)
    if _shows(self.__dict__):
        replica.__dict__[SHOWN] = types.MethodType(extra_repr, replica)
    return replica


# Copies of bound methods are found again by these names, too.
def __getstate__(self: nn.Module) -> Any:  # noqa: N807
    """The state for pickles and shallow copies: the model as it was before `convert`.

    Therefore a pickle of a whole model loads where there is no autoamp, and a copy
    never runs the weights of the original.
    """
    _say_unconverted(self)
    state = _state_by_its_class(self)
    return without_ours(state, self) if isinstance(state, dict) else state


def _say_unconverted(model: nn.Module) -> None:
    engine = model.__dict__[STATE].engine
    is_part = model.__dict__[STATE].root is not None  # its root says so
    if engine is not None and not is_part and not engine.record.scaling.automatic:
        logger.warning(
            "autoamp: a pickle or shallow copy of %s is not converted: it runs in fp32 "
            "until you call autoamp.convert(copy)",
            class_name(model),
        )


def _state_by_its_class(model: nn.Module) -> Any:
    own: Any = type(model).__getstate__
    return own(model)


def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
    """`__getstate__` for a class with pickling methods of its own (GraphModule)."""
    _say_unconverted(self)
    with _as_it_was(self):
        own: Any = self.__reduce_ex__
        return _replaced(own(protocol), self.__dict__, dict(self.__dict__))


def _replaced(value: Any, part: Any, by: Any) -> Any:
    """`value`, which is or holds `part` in tuples, with `by` in place of `part`."""
    if value is part:
        return by
    if type(value) is tuple:
        return tuple(_replaced(each, part, by) for each in value)
    return value


def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> Any:  # noqa: N807
    """A deep copy is converted as well, and runs weights of its own."""
    if getattr(type(self), COPY, None) or COPY in self.__dict__[STATE].replaced:
        return _copied_by_itself(self, memo)
    other = type(self).__new__(type(self))
    memo[id(self)] = other
    other.__setstate__(copy.deepcopy(_state_by_its_class(self), memo))
    _watch(other, self.__dict__[STATE])
    return other


def _copied_by_itself(model: nn.Module, memo: dict[int, Any]) -> Any:
    """A converted copy made by the model's own `__deepcopy__`."""
    state: Conversion = model.__dict__[STATE]
    # It may copy the `__dict__`, in which our `forward` is bound to the original.
    with _as_it_was(model):
        own: Any = model.__deepcopy__
        result = own(memo)
    if result is model or not isinstance(result, nn.Module) or state.call is None:
        return result
    new = install(result)
    new.call = state.call
    of_class = new.previous is None
    if type(result) is not type(model) or of_class != (state.previous is None):
        new.call = Entry(state.call.engine, type(result), of_class=of_class)
    _watch(result, state)
    return result


def _watch(copied: nn.Module, state: Conversion) -> None:
    """Has the modules in a copy watched where those in the original are."""
    if state.watch is not None and isinstance(copied.__dict__.get(STATE), Conversion):
        state.watch.over(copied)


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """A region in which the instance is as it was before `install`."""
    converted = dict(model.__dict__)
    uninstall(model)
    plain = dict(model.__dict__)
    try:
        yield
    finally:
        ours = {k: v for k, v in converted.items() if plain.get(k) is not v}
        model.__dict__.update(ours)


def __prepare_scriptable__(self: nn.Module) -> nn.Module:  # noqa: N807
    """The module for `torch.jit.script`: the model's own code on the same weights."""
    plain = type(self).__new__(type(self))
    # `torch.jit.script` would compile the `forward` on the instance, which is ours.
    plain.__dict__.update(without_ours(self.__dict__, self))
    return plain
