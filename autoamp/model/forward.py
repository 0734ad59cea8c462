"""Makes the `forward` and methods of a converted model, and the code they compile."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from autoamp import compat
from autoamp.capture.code import Method
from autoamp.model.call.calls import under_compilation
from autoamp.model.call.thread import inside_a_call

MADE_HERE = "_autoamp_method"
"""Set on functions that `make_method` made."""


def make_forward(
    owner: type[nn.Module], existing: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The instance's new `forward`; a plain function that takes the instance."""
    entry = plain_entry(owner, existing is None)
    known = owner.forward

    # `wraps` keeps the signature (Trainer and generate read it) and the name "forward",
    # by which bound methods are copied and pickled.
    @functools.wraps(existing if existing is not None else owner.forward)
    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal entry, known
        state: Any = self._autoamp
        call = state.call
        if existing is None and type(self).forward is not known:
            # Somebody has given the class, or the model, another `forward`.
            known = type(self).forward
            entry = plain_entry(type(self), of_class=True)
            if call is not None:
                call.renew(forward_of(type(self), of_class=True))
        if call is None:
            return entry(self, *args, **kwargs)
        if under_compilation():
            return call.inlined(entry, self, args, kwargs)
        return call(self, args, kwargs)

    forward.__name__ = "forward"
    if existing is not None:
        _keep_bound_signature(forward, existing)
    return forward


def make_method(owner: type[nn.Module], name: str) -> Callable[..., Any]:
    """The instance's new method `name`, converted like and together with `forward`."""
    plain = getattr(owner, name)
    this = method_of(owner, name)
    entry = this.entry()

    @functools.wraps(plain)
    def method(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        state: Any = self._autoamp
        call = state.call
        if call is None:
            return plain(self, *args, **kwargs)
        if under_compilation():
            return call.inlined(entry, self, args, kwargs, this)
        if inside_a_call():  # the outer call's capture includes this
            return plain(self, *args, **kwargs)
        return call.of(this)(self, args, kwargs)

    # Where a `forward` is left to Python, the user's code is captured and not this.
    compat.never_a_graph_by_itself(method)
    method.__name__ = name  # by which bound methods are copied and pickled
    method.__dict__[MADE_HERE] = True
    return method


def forward_of(owner: type[nn.Module], of_class: bool) -> Method:
    """The `forward` that a model's calls run: its class's, or the instance's own."""
    make = functools.partial(plain_entry, owner, of_class)
    return Method("forward", make, _shared(owner, "forward") if of_class else None)


def method_of(owner: type[nn.Module], name: str) -> Method:
    """The method `name` of a class."""
    make = functools.partial(method_entry, owner, name)
    return Method(name, make, _shared(owner, name))


def _shared(owner: type[nn.Module], name: str) -> Hashable | None:
    """A key equal for models whose method `name` has the same code, or None."""
    function: Any = getattr(owner, name)
    if not isinstance(function, types.FunctionType):
        return None
    return name, weakref.ref(owner), weakref.ref(function)


def method_entry(owner: type[nn.Module], name: str) -> Callable[..., Any]:
    """Method `name` of a class as a function of the instance, to be compiled."""
    inner = _with_own_code(getattr(owner, name))

    def entry(mod: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return inner(mod, *args, **kwargs)

    return entry


def _keep_bound_signature(forward: Any, existing: Callable[..., Any]) -> None:
    """Gives `forward` the signature of `existing` with a first parameter added.

    `existing` is bound, so it has no `self` for a `MethodType` to take away.
    """
    del forward.__wrapped__
    try:
        signature = inspect.signature(existing)
    except (TypeError, ValueError):  # C callables may have none
        return
    name = "_model"
    while name in signature.parameters:
        name = f"_{name}"
    first = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(
        parameters=[first, *signature.parameters.values()]
    )


def plain_entry(owner: type[nn.Module], of_class: bool) -> Callable[..., Any]:
    """The model's previous code as a function of the instance, to be compiled.

    The instance is positional only, as everywhere on a call's path: the model's own
    keyword arguments may have any name.
    """
    if of_class:
        inner = _with_own_code(owner.forward)

        def entry(mod: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return inner(mod, *args, **kwargs)

        return entry

    def entry_of_instance(mod: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # `previous` is looked up on the instance, because a deep copy has its own.
        state: Any = mod._autoamp
        return state.previous(*args, **kwargs)

    return entry_of_instance


def _with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own.

    Dynamo counts recompiles per code object.  After a graph break in `forward` Dynamo
    compiles `forward` by itself, and models of one class would share its recompile
    limit.
    """
    if not isinstance(forward, types.FunctionType):
        return forward
    fresh = types.FunctionType(
        forward.__code__.replace(),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    fresh.__kwdefaults__ = forward.__kwdefaults__
    return fresh
