"""Finds models that are alike: each could be a deep copy of the other, but for weights.

`likeness` takes a model and the arguments of a call, and gives a key that is equal for
models that are alike; Dynamo captures models with one key only once.  A difference that
the key overlooks does no harm, because Dynamo guards all values that it reads, and
captures anew.  Models that need graphs of their own get different keys, because they
would fill each other's recompile limit.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoamp import compat

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""Types of the values that Dynamo takes for constants and guards by value."""

_EVERY = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes that every module has: its parameters, buffers, children and hooks."""

_MOST = 256
"""How many values of one list or dictionary are looked at; a look at more would cost
more than shared graphs may save."""


STATE = "_autoamp"
"""The attribute of a converted model that holds its `Conversion`."""


class _Unlike(Exception):  # noqa: N818 (found, not failed)
    """The model holds something (a hook, function or tensor) that no key describes."""


def likeness(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Hashable | None:
    """A key equal for models alike and called alike; None for a model like no other.

    The key keeps neither classes nor functions alive.

    Args:
        args, kwargs: the arguments of the call.
    """
    numbers: dict[int, int] = {}
    try:
        kept = (
            tuple(
                (name, *_of_module(module, module is model, numbers))
                for name, module in model.named_modules()
            ),
            tuple(map(_argument, _leaves(args, kwargs))),
            tuple(kwargs),
        )
    except (_Unlike, AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return kept


def _of_module(
    module: nn.Module, root: bool, numbers: dict[int, int]
) -> list[Hashable]:
    """The key of one module; `numbers` counts tensors, because they may be shared."""
    own = module.__dict__
    is_scripted = "_parameters" not in own
    if is_scripted or (STATE in own and not root):
        raise _Unlike
    found: list[Hashable] = [weakref.ref(type(module))]
    for kind in ("_parameters", "_buffers"):
        for name, value in own[kind].items():
            number = numbers.setdefault(id(value), len(numbers))
            found.append((name, number, _value(value)))
    if any(map(own.get, compat.HOOKS)):
        raise _Unlike
    for name in own:
        if name not in _EVERY:
            value = own[name]
            if not (root and (name == STATE or isinstance(value, types.MethodType))):
                found.append((name, _held(value)))
    return found


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    """The leaves of a call's arguments; most calls have nothing but tensors."""
    if not kwargs and all(isinstance(each, torch.Tensor) for each in args):
        return args
    return pytree.tree_leaves((args, kwargs))


def _held(value: Any) -> Hashable:
    """A key for one attribute of a module: no parameter, buffer or child."""
    if value is None or type(value) in _PLAIN:
        return value  # type: ignore[no-any-return]
    if not isinstance(value, list | tuple | dict):
        return _value(value)
    if type(value) is tuple and all(type(each) in _PLAIN for each in value):
        return value
    # A generator stops at the limit: a vocabulary has a million entries.
    leaves = [*itertools.islice(pytree.tree_iter(value), _MOST + 1)]
    if len(leaves) > _MOST:
        raise _Unlike
    return str(pytree.tree_structure(value)), tuple(map(_value, leaves))


def _value(value: Any) -> Hashable:
    """A key for one value, different where Dynamo would need another graph."""
    if isinstance(value, torch.Tensor):  # a number may decide what stays fp32
        return _argument(value), compat.held_number(value)
    if value is None or isinstance(value, _PLAIN):
        return value
    if callable(value) and not isinstance(value, nn.Module):
        return _function(value)
    inside = itertools.islice(pytree.tree_iter(getattr(value, "__dict__", {})), _MOST)
    if any(isinstance(each, torch.Tensor) for each in inside):
        raise _Unlike
    return weakref.ref(type(value))


def _argument(value: Any) -> Hashable:
    """A key for one argument of a call; the key of a tensor leaves its values out."""
    if not isinstance(value, torch.Tensor):
        return _value(value)
    kind = weakref.ref(type(value))
    return kind, value.shape, value.dtype, value.device, value.requires_grad


def _function(value: Any) -> Hashable:
    """A key for a function or a class, such as `functional.relu`: its identity."""
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        raise _Unlike
    return weakref.ref(value)
