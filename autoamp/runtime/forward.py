"""The `forward` of a model, and the `forward` that takes its place on the instance."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from autoamp.runtime.program import under_compilation


def make_forward(
    owner: type[nn.Module], existing: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The instance's new `forward`; a plain function that takes the instance."""
    plain = plain_function(owner, existing is None)
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
            plain = plain_function(type(self), of_class=True)
            if call is not None:
                call.renew(type(self))
        if call is None:
            return plain(self, *args, **kwargs)
        if under_compilation():
            return call.inlined(plain, self, args, kwargs)
        return call(self, args, kwargs)

    forward.__name__ = "forward"
    if existing is not None:
        _keep_bound_signature(forward, existing)
    return forward


def _keep_bound_signature(forward: Any, existing: Callable[..., Any]) -> None:
    """Gives `forward` the signature of `existing` with a first parameter added."""
    # `inspect.signature` would follow `__wrapped__`, which is bound, and drop the first
    # real parameter as `self`.
    del forward.__wrapped__
    try:
        signature = inspect.signature(existing)
    except (TypeError, ValueError):  # C callables may have none
        return
    name = "_model"
    while name in signature.parameters:
        name = f"_{name}"
    # `existing` is bound, and has no `self` for a `MethodType` to take away.
    first = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(
        parameters=[first, *signature.parameters.values()]
    )


def plain_function(owner: type[nn.Module], of_class: bool) -> Callable[..., Any]:
    """The model's own `forward` as a function of the instance, to be compiled.

    The instance is positional only, as everywhere on a call's path: the model's own
    keyword arguments may have any name.

    Args:
        of_class: whether to take the `forward` of class `owner`; if not, the one that
            another library had put on the instance.
    """
    if of_class:
        # Fourteen models that shared one code object got eight graphs: six of them ran
        # in fp32, without a word.
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
