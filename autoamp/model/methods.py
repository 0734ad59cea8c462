"""Finds methods besides `forward` that compute: `model.encode(x)`, a VAE's `sample`.

A script calls such methods without `forward`, so modules called there would run in
fp32.  The source of a method decides: a method that calls a module of the model's own
computes, unless the method also trains (`loss.backward()`), which no graph can do.  The
called objects are looked up on the model: `self.embedding.weight.numel()` is the method
of a tensor.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from autoamp import compat

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
    children = frozenset(compat.children_here(model))
    if not children:
        return ()
    owner: Any = type(model)
    return tuple(
        name
        for name, called in _methods_of(owner, children)
        if any(_is_computation(function, model) for function in called)
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
    plain = inspect.unwrap(function)
    return getattr(plain, "__code__", function.__code__)


@functools.lru_cache(maxsize=256)
def _methods_of(
    owner: Any, children: frozenset[str]
) -> tuple[tuple[str, tuple[ast.expr, ...]], ...]:
    """The public methods of a class, each with its calls on child modules."""
    public = ((name, f) for name, f in _functions_of(owner) if _is_public(name))
    found = ((name, tuple(_called(f, children))) for name, f in public)
    return tuple((name, called) for name, called in found if called)


def _is_public(name: str) -> bool:
    return not name.startswith("_") and not hasattr(nn.Module, name)


def _called(function: types.FunctionType, children: frozenset[str]) -> list[ast.expr]:
    """The functions of children that a method calls; none if the method trains."""
    plain: Any = inspect.unwrap(function)
    if not isinstance(plain, types.FunctionType):
        return []
    # Most methods are ruled out here, without a look at their source.
    if children.isdisjoint(plain.__code__.co_names):
        return []
    suspends = inspect.isgeneratorfunction(plain) or inspect.iscoroutinefunction(plain)
    if suspends or not plain.__code__.co_argcount:
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    except (OSError, SyntaxError, TypeError):
        return []
    this = plain.__code__.co_varnames[0]
    called = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    if any(_trains(f, this) for f in called):
        return []
    looped = dict(_loops(tree, this, children))
    found = [_as_child(f, this, children, looped) for f in called]
    return [f for f in found if f is not None]


def _trains(value: ast.AST, this: str) -> bool:
    """Whether a call of the function `value` shows that the method trains."""
    if not isinstance(value, ast.Attribute):
        return False
    own = isinstance(value.value, ast.Name) and value.value.id == this
    return value.attr in _TRAINS or (own and value.attr in _OF_A_LOOP)


def _loops(
    tree: ast.AST, this: str, children: frozenset[str]
) -> Iterator[tuple[str, ast.expr]]:
    """Variables of loops over children, with the children (`for x in self.layers`)."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.For, ast.comprehension)):
            continue
        for part in ast.walk(node.iter):
            held = _as_child(part, this, children, {})
            if held is not None:
                names = ast.walk(node.target)
                yield from (
                    (each.id, held) for each in names if isinstance(each, ast.Name)
                )
                break


def _as_child(
    value: ast.AST, this: str, children: frozenset[str], looped: dict[str, ast.expr]
) -> ast.expr | None:
    """`value` if it is `self.child`, `self.child[i]` or `self.child.part`, or None.

    The variable of a loop over children counts as an element of the children.

    Methods that every module has, such as `self.child.parameters`, do not count,
    because they compute nothing.
    """
    if isinstance(value, ast.Name) and value.id in looped:
        return ast.Subscript(looped[value.id], ast.Constant(0), ast.Load())
    if isinstance(value, ast.Subscript):
        inner = _as_child(value.value, this, children, looped)
        return None if inner is None else ast.Subscript(inner, value.slice, value.ctx)
    if not isinstance(value, ast.Attribute):
        return None
    if isinstance(value.value, ast.Name) and value.value.id == this:
        return value if value.attr in children else None
    inner = _as_child(value.value, this, children, looped)
    if inner is None or hasattr(nn.Module, value.attr):
        return None
    return ast.Attribute(inner, value.attr, value.ctx)


def _is_computation(function: ast.expr, model: nn.Module) -> bool:
    """Whether a call of `function` calls a module, or a method that its class defines.

    Methods of tensors, and of plain objects that modules hold, do not count.
    """
    if any(isinstance(each, nn.Module) for each in _held(function, model)):
        return True
    if not isinstance(function, ast.Attribute):
        return False
    owners = _held(function.value, model)
    return any(
        isinstance(owner, nn.Module) and not _holds(owner, function.attr)
        for owner in owners
    )


def _held(value: ast.expr, model: nn.Module) -> list[Any]:
    """The objects that an expression may stand for; empty where it is unknown."""
    if isinstance(value, ast.Name):
        return [model]
    if isinstance(value, ast.Subscript):
        return [part for each in _held(value.value, model) for part in _parts_of(each)]
    assert isinstance(value, ast.Attribute)
    owners = _held(value.value, model)
    found = (_attribute(owner, value.attr) for owner in owners)
    return [each for each in found if each is not None]


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        return compat.children_here(value).values()
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _attribute(owner: Any, name: str) -> Any:
    """The object that `owner` holds under a name, found without running its code."""
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


def _holds(owner: nn.Module, name: str) -> bool:
    return isinstance(_attribute(owner, name), (nn.Module, torch.Tensor))
