"""Puts our methods on a converted instance: `forward`, and methods that copy it."""

from __future__ import annotations

import contextlib
import copy
import logging
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from autoamp.capture.alike import STATE
from autoamp.model.call.entry import Entry
from autoamp.model.conversion import (
    COPY,
    OUR_ATTRIBUTES,
    REDUCE,
    SCRIPT,
    Conversion,
    own_methods,
    uninstall,
    without_ours,
)
from autoamp.model.forward import make_forward, make_method
from autoamp.model.methods import computing_methods
from autoamp.printable import class_name

logger = logging.getLogger(__name__)


def install(model: nn.Module) -> Conversion:
    """Puts our methods on the instance.

    The methods call the model's own code until `Conversion.call` is set.
    """
    own = model.__dict__
    replaced = {name: own[name] for name in ("forward", *OUR_ATTRIBUTES) if name in own}
    bound = types.MethodType(make_forward(type(model), replaced.get("forward")), model)
    methods = [name for name in computing_methods(model) if name not in own]
    state = Conversion(None, replaced, bound, methods=tuple(methods))
    own[STATE] = state
    own["forward"] = bound
    for name in methods:
        own[name] = types.MethodType(make_method(type(model), name), model)
    for method in (_replicate_for_data_parallel, __getstate__, __deepcopy__):
        own[method.__name__] = types.MethodType(method, model)
    own[SCRIPT] = types.MethodType(__prepare_scriptable__, model)
    if _reduces_itself(model):
        own[REDUCE] = types.MethodType(__reduce_ex__, model)
    return state


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
        replica.__dict__["forward"] = types.MethodType(bound.__func__, replica)
    for name in own_methods(self.__dict__, state):
        method = self.__dict__[name].__func__
        replica.__dict__[name] = types.MethodType(method, replica)
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


def _reduces_itself(model: nn.Module) -> bool:
    """Whether the class, or the instance, has pickling methods of its own."""
    kind: Any = type(model)
    default = kind.__reduce__ is object.__reduce__
    return (
        not default
        or kind.__reduce_ex__ is not object.__reduce_ex__
        or REDUCE in model.__dict__
    )


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
    """A converted copy made by the model's own `__deepcopy__`.

    The model's own `__deepcopy__` may copy the `__dict__`, in which our `forward` would
    run the original.  So our attributes are taken away during the copy.
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
        new.call = Entry(state.call.engine, type(made), of_class=of_class)
    _watch(made, state)
    return made


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
    plain.__dict__.update(without_ours(self.__dict__, self))
    return plain
