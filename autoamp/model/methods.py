"""Finds methods besides `forward` that compute: `model.encode(x)`, a VAE's `sample`.

A script calls such methods past `forward`, so modules called there would run in fp32.
The source of a method tells: a method that calls a module of the model's own computes,
unless the method also trains (`loss.backward()`), which is no work for a graph.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

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
    are not among them.
    """
    children = frozenset(name for name, _ in model.named_children())
    owner: Any = type(model)
    return _methods_of(owner, children) if children else ()


@functools.lru_cache(maxsize=256)
def _methods_of(owner: Any, children: frozenset[str]) -> tuple[str, ...]:
    found: dict[str, bool] = {}
    for base in owner.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            break
        for name, function in vars(base).items():
            if name not in found and isinstance(function, types.FunctionType):
                found[name] = _is_public(name) and _computes(function, children)
    return tuple(name for name, computes in found.items() if computes)


def _is_public(name: str) -> bool:
    return not name.startswith("_") and not hasattr(nn.Module, name)


def _computes(function: types.FunctionType, children: frozenset[str]) -> bool:
    plain: Any = inspect.unwrap(function)
    if not isinstance(plain, types.FunctionType):
        return False
    # Most methods are ruled out here, without a look at their source.
    if children.isdisjoint(plain.__code__.co_names):
        return False
    suspends = inspect.isgeneratorfunction(plain) or inspect.iscoroutinefunction(plain)
    if suspends or not plain.__code__.co_argcount:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    except (OSError, SyntaxError, TypeError):
        return False
    this = plain.__code__.co_varnames[0]
    called = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    if any(_trains(f, this) for f in called):
        return False
    looped = set(_loop_names(tree, this, children))
    return any(
        _is_child(f, this, children) or (isinstance(f, ast.Name) and f.id in looped)
        for f in called
    )


def _trains(value: ast.AST, this: str) -> bool:
    """Whether a call of the function `value` shows that the method trains."""
    if not isinstance(value, ast.Attribute):
        return False
    own = isinstance(value.value, ast.Name) and value.value.id == this
    return value.attr in _TRAINS or (own and value.attr in _OF_A_LOOP)


def _loop_names(tree: ast.AST, this: str, children: frozenset[str]) -> Iterator[str]:
    """Names of the variables of loops over children: `for layer in self.layers`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.comprehension)) and any(
            _is_child(part, this, children) for part in ast.walk(node.iter)
        ):
            names = ast.walk(node.target)
            yield from (part.id for part in names if isinstance(part, ast.Name))


def _is_child(value: ast.AST, this: str, children: frozenset[str]) -> bool:
    """Whether `value` is `self.child`, `self.child[i]` or `self.child.part`.

    Methods that every module has, such as `self.child.parameters`, do not count,
    because they compute nothing.
    """
    if isinstance(value, ast.Subscript):
        return _is_child(value.value, this, children)
    if not isinstance(value, ast.Attribute):
        return False
    if isinstance(value.value, ast.Name):
        return value.value.id == this and value.attr in children
    return not hasattr(nn.Module, value.attr) and _is_child(value.value, this, children)
