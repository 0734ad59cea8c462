"""Makes the `forward` and methods of a converted model, and the code to compile."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from autoamp import compat
from autoamp.capture.thread import inside_captured_code, under_compilation

MADE_HERE = "_autoamp_method"
"""Set on functions that `make_method` made."""


def make_forward(
    owner: type[nn.Module], existing: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The instance's new `forward`; a plain function that takes the instance."""
    plain = plain_function(owner, "forward", existing is None)
    known = owner.forward

    # `wraps` keeps the signature (Trainer and generate read it) and the name "forward",
    # by which bound methods are copied and pickled.
    @functools.wraps(existing if existing is not None else owner.forward)
    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal plain, known
        state: Any = self._autoamp
        call = state.call
        if existing is None and type(self).forward is not known:
            # The class has been given another `forward`, or the model another class.
            known = type(self).forward
            plain = plain_function(type(self), "forward", of_class=True)
            if call is not None:
                call.renew(type(self))
        if call is None:
            return plain(self, *args, **kwargs)
        if under_compilation():
            return call.inlined(plain, self, args, kwargs, owner=owner)
        return call(self, args, kwargs)

    forward.__name__ = "forward"
    if existing is not None:
        _keep_bound_signature(forward, existing)
    return forward


def make_method(owner: type[nn.Module], name: str) -> Callable[..., Any]:
    """The instance's new method `name`, which shares the conversion of `forward`."""
    plain = getattr(owner, name)
    entry = plain_function(owner, name, of_class=True)

    @functools.wraps(plain)
    def method(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        state: Any = self._autoamp
        call = state.call
        if call is None:
            return plain(self, *args, **kwargs)
        if under_compilation():
            return call.inlined(entry, self, args, kwargs, owner=owner, name=name)
        is_off = compat.frame_callback() is None
        if inside_captured_code(is_off=is_off):  # the outer call includes this call
            return plain(self, *args, **kwargs)
        return call.of(owner, name)(self, args, kwargs)

    # Where a `forward` is left to Python, Dynamo must capture the user's method, not
    # this wrapper.
    compat.never_a_graph_by_itself(method)
    method.__name__ = name  # by which bound methods are copied and pickled
    method.__dict__[MADE_HERE] = True
    return method


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


def plain_function(
    owner: type[nn.Module], name: str, of_class: bool
) -> Callable[..., Any]:
    """The model's own method as a function of the instance, to be compiled.

    The instance is positional only, as everywhere on a call's path: the model's own
    keyword arguments may have any name.

    Args:
        of_class: whether to take the function of class `owner`; if not, the `forward`
            that another library had put on the instance.
    """
    if of_class:
        inner = _with_own_code(getattr(owner, name))

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
