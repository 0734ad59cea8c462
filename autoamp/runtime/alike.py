"""Which models are alike: one could be a deep copy of the other, but for its weights.

Dynamo captures such models once.  It guards what it reads and would capture anew where
something was overlooked here; models that have graphs of their own are told apart lest
they fill each other's recompile limit.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoamp import compat

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""Types of what Dynamo takes for constants, and guards by value."""

_EVERY = frozenset(nn.Module().__dict__) - {"training"}
"""What every module keeps for itself: its parameters, buffers, children and hooks."""

_HOOKS = tuple(
    name for name in _EVERY if name.endswith("_hooks") and "dict" not in name
)

_DEEPEST = 3
"""So far into lists, and no further, it is worth telling models apart."""


STATE = "_autoamp"
"""The attribute of a converted model that holds what the conversion keeps."""


class _Unlike(Exception):  # noqa: N818 (found, not failed)
    """The model has hooks, functions, or tensors where nobody would look for them."""


def likeness(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Hashable | None:
    """Equal for models that are alike and called alike; None for one like no other.

    It keeps nothing alive, neither classes nor functions.

    Args:
        args, kwargs: of the call.
    """
    places: dict[int, int] = {}
    try:
        kept = (
            tuple(
                (name, *_of_module(module, module is model, places))
                for name, module in model.named_modules()
            ),
            tuple(_value(v) for v in pytree.tree_leaves((args, kwargs))),
            tuple(kwargs),
        )
        hash(kept)
    except (_Unlike, RuntimeError, TypeError, ValueError):
        return None
    return kept


def _of_module(
    module: nn.Module, root: bool, places: dict[int, int]
) -> Iterator[Hashable]:
    """What is said of one module; `places` numbers tensors, which may be shared."""
    own = module.__dict__
    if any(own.get(name) for name in _HOOKS) or (STATE in own and not root):
        raise _Unlike
    yield weakref.ref(type(module))
    for kind in ("_parameters", "_buffers"):
        for name, value in own[kind].items():
            place = places.setdefault(id(value), len(places))
            yield name, place, _value(value), compat.held_number(value)
    for name, value in own.items():
        ours = root and (name == STATE or isinstance(value, types.MethodType))
        if name not in _EVERY and not ours:
            number = compat.held_number(value)
            yield name, _value(value), number


def _value(value: Any, depth: int = 0) -> Hashable:
    """What tells one value from others that Dynamo would not run the same graph on."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        kind = weakref.ref(type(value))
        return kind, value.shape, value.dtype, value.device, value.requires_grad
    if callable(value) and not isinstance(value, nn.Module):
        return _function(value)
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        return type(value), tuple(_value(each, depth + 1) for each in value)
    if isinstance(value, dict) and depth < _DEEPEST:
        pairs = ((k, _value(v, depth + 1)) for k, v in value.items())
        return type(value), tuple(pairs)
    if any(
        isinstance(v, torch.Tensor) for v in getattr(value, "__dict__", {}).values()
    ):
        raise _Unlike  # the number in one may decide what stays fp32
    return weakref.ref(type(value))


def _function(value: Any) -> Hashable:
    """A function or a class, such as `functional.relu`, by its identity."""
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        raise _Unlike
    return weakref.ref(value)
