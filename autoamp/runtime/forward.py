"""The methods of a model that compute, and the methods that take their place.

A script may call `model.encode(x)` instead of `model(x)`.  Such methods are captured
like `forward`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.runtime.program import inside_captured_code, under_compilation

_TRAINS = frozenset(
    {"backward", "load_state_dict", "save", "state_dict", "step", "zero_grad"}
)
"""Functions of an optimizer, a loss or torch that methods of a training loop call."""

_OF_A_LOOP = frozenset({"log", "log_dict", "manual_backward", "optimizers"})
"""Methods of the model itself that methods of a training loop call in a trainer.

They count only on the model, because `x.log()` is a computation.
"""


def computing_methods(model: nn.Module) -> tuple[str, ...]:
    """The public methods of the model's class, `forward` apart, that call its modules.

    Methods of torch's own classes, generators, coroutines and methods without source
    do not count.
    """
    children = compat.children_here(model).keys()
    return tuple(
        name
        for name, function in _functions_of(type(model))
        if not (name.startswith("_") or hasattr(nn.Module, name))
        # Most methods are ruled out here, without a look at their source.
        and not children.isdisjoint(_code_of(function).co_names)
        and _computes(function, model)
    )


def methods_past(model: nn.Module) -> list[str]:
    """The methods that use the model's children or weights, and are not captured."""
    held = compat.children_here(model).keys() | compat.parameters_here(model).keys()
    captured = {"forward", *computing_methods(model)}
    return [
        name
        for name, function in _functions_of(type(model))
        if name not in captured
        and not name.startswith("__")
        and not held.isdisjoint(_code_of(function).co_names)
    ]


def _functions_of(owner: Any) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions of a class and its bases by name, without those of torch's own."""
    seen: set[str] = set()
    for base in owner.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            return
        for name, function in vars(base).items():
            if name not in seen and isinstance(function, types.FunctionType):
                seen.add(name)
                yield name, function


def _code_of(function: types.FunctionType) -> types.CodeType:
    return getattr(inspect.unwrap(function), "__code__", function.__code__)


def _computes(function: types.FunctionType, model: nn.Module) -> bool:
    """Whether a method calls a module, or a method that the module's class defines."""
    this, called, loops = _calls_in(function)
    names: dict[str, list[Any]] = {this: [model]}
    for loop in loops:  # `for layer in self.layers`
        found = (_values(part, names) for part in ast.walk(loop.iter))
        held = next((v for v in found if v and all(o is not model for o in v)), [])
        parts = [part for each in held for part in _parts_of(each)]
        targets = (n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name))
        names |= dict.fromkeys(targets, parts) if held else {}
    return any(_calls_a_module(each, names, model) for each in called)


_Calls = tuple[str, list[ast.expr], list[ast.For | ast.comprehension]]


@functools.lru_cache(maxsize=256)
def _calls_in(function: types.FunctionType) -> _Calls:
    """The first parameter of a method, what it calls, and its loops.

    None of them for a method that trains, or whose source is unknown.
    """
    plain: Any = inspect.unwrap(function)
    nothing: _Calls = ("", [], [])
    if not isinstance(plain, types.FunctionType) or not plain.__code__.co_argcount:
        return nothing
    if inspect.isgeneratorfunction(plain) or inspect.iscoroutinefunction(plain):
        return nothing
    try:
        nodes = [*ast.walk(ast.parse(textwrap.dedent(inspect.getsource(plain))))]
    except (OSError, SyntaxError, TypeError):
        return nothing
    this = plain.__code__.co_varnames[0]
    called = [n.func for n in nodes if isinstance(n, ast.Call)]
    for each in called:
        if isinstance(each, ast.Attribute):
            own = isinstance(each.value, ast.Name) and each.value.id == this
            if each.attr in _TRAINS or (own and each.attr in _OF_A_LOOP):
                return nothing
    loops = [n for n in nodes if isinstance(n, ast.For | ast.comprehension)]
    return this, called, loops


def _calls_a_module(
    called: ast.expr, names: dict[str, list[Any]], model: nn.Module
) -> bool:
    """Whether a call of this expression computes with a module in the model.

    Methods of tensors, and of plain objects that modules hold, do not count, nor do
    methods that every module has, such as `self.child.parameters`.
    """
    if any(isinstance(v, nn.Module) and v is not model for v in _values(called, names)):
        return True
    if not isinstance(called, ast.Attribute) or hasattr(nn.Module, called.attr):
        return False
    return any(
        isinstance(owner, nn.Module)
        and owner is not model
        and not isinstance(_attribute(owner, called.attr), nn.Module | torch.Tensor)
        for owner in _values(called.value, names)
    )


def _values(expression: ast.AST, names: dict[str, list[Any]]) -> list[Any]:
    """The objects that an expression may stand for; empty where it is unknown."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id, [])
    if isinstance(expression, ast.Subscript):
        held = _values(expression.value, names)
        return [part for each in held for part in _parts_of(each)]
    if not isinstance(expression, ast.Attribute):
        return []
    owners = _values(expression.value, names)
    found = (_attribute(owner, expression.attr) for owner in owners)
    return [each for each in found if each is not None]


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        return compat.children_here(value).values()
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _attribute(owner: Any, name: str) -> Any:
    """The object that a module holds under a name, found without running its code."""
    if not isinstance(owner, nn.Module):
        return None
    for held in (
        compat.children_here(owner),
        compat.parameters_here(owner),
        compat.buffers_here(owner),
        vars(owner),
    ):
        if name in held:
            return held[name]
    return None


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
        # Dynamo has no callback on this thread where it is switched off.
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
        # Fourteen models that shared one code object got eight graphs: six of them ran
        # in fp32, without a word.
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
