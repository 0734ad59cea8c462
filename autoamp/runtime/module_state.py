"""Saves the state of a module, and restores it after a call made only to learn.

A forward may append to a list of its own, fill a cache, count in a tensor or set an
attribute.  The contents of each object that the module's attributes lead to are saved,
and are put back into the same object.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autoamp import compat

Restore = Callable[[], None]

_NOT_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType)
_MACHINERY = ("autoamp.", "torch._")
"""Packages whose objects are the machinery around a model: conversions and graphs."""


def capture_now(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    weights: bool = False,
) -> None:
    """Calls `model` once; the model and the random state stay as they were.

    A model in training mode is captured with gradients, a model in eval mode without.
    Inside `torch.inference_mode()` a model is captured for calls in that mode, which
    have graphs of their own.

    Args:
        weights: as for `left_as_it_is`.
    """
    with left_as_it_is(model, weights=weights), torch.set_grad_enabled(model.training):
        model(*args, **(kwargs or {}))


@contextlib.contextmanager
def left_as_it_is(model: nn.Module, *, weights: bool = False) -> Iterator[None]:
    """A region after which `model` and the random generators are as they were.

    Every attribute of every module, and every list, dict, tensor or other object that
    an attribute leads to, is the same object with the same contents; after an error
    too.

    Args:
        weights: whether parameters are restored too, which takes their memory again.
    """
    kept, drawn = Kept(model, weights=weights), compat.Generators()
    try:
        yield
    finally:
        drawn.restore()
        kept.restore()


class Kept:
    """The saved contents of a module and of all objects that its attributes lead to."""

    def __init__(self, model: nn.Module, *, weights: bool) -> None:
        """Saves the contents.

        Args:
            weights: whether parameters are saved too, which takes their memory again.
        """
        self._weights = weights
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # so that no `id` is given to another object
        self._restores: list[Restore] = []
        todo: list[Any] = [*model.modules()]
        while todo:
            value = todo.pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._alive.append(value)
                todo.extend(self._remember(value))

    def restore(self) -> None:
        """Restores every object whose contents have changed."""
        with torch.no_grad():
            for restore in self._restores:
                restore()

    def _remember(self, value: Any) -> Iterable[Any]:
        """Saves the contents of one object; returns the objects that it leads to."""
        if isinstance(value, Tensor):
            # Forwards write to buffers and tensors of their own, and hardly to
            # parameters, whose copies would double a model's memory.
            if not isinstance(value, nn.Parameter) or self._weights:
                self._restores.append(_tensor(value))
            return ()
        if isinstance(value, tuple | frozenset):
            return value
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            self._restores.append(_array(value))
            return ()
        members: list[Any] = []
        if isinstance(value, dict):
            self._restores.append(_dict(value))
            # A class such as ModelOutput may have a `values` of its own.
            members += dict.values(value)
        elif isinstance(value, list | deque | set):
            self._restores.append(_collection(value))
            members += value
        may_be_state = not isinstance(value, _NOT_STATE)
        if may_be_state and not type(value).__module__.startswith(_MACHINERY):
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:
                self._restores.append(_dict(attributes))
                members += attributes.values()
        if isinstance(value, nn.Module):  # a class may keep its buffers elsewhere
            buffers = compat.buffers_here(value)
            self._restores.append(_dict(buffers))
            members += buffers.values()
        return members


def _dict(live: dict[Any, Any]) -> Restore:
    before = dict(live)
    # The class's own methods may forbid a change, as in a ModelOutput.
    base: Any = OrderedDict if isinstance(live, OrderedDict) else dict

    def restore() -> None:
        # What has not changed is not written: a write bumps version counters, and may
        # call code of a subclass.
        same = [*live] == [*before] and all(
            dict.__getitem__(live, key) is value for key, value in before.items()
        )
        if not same:
            base.clear(live)
            for key, value in before.items():
                base.__setitem__(live, key, value)

    return restore


def _collection(live: Any) -> Restore:
    before = [*live]
    base: Any = next(kind for kind in (list, deque, set) if isinstance(live, kind))
    fill = base.update if base is set else base.extend

    def restore() -> None:
        now = [*live]
        if [*map(id, now)] != [*map(id, before)]:
            base.clear(live)
            fill(live, before)

    return restore


def _array(live: Any) -> Restore:
    before = live.copy()

    def restore() -> None:
        if live.tobytes() != before.tobytes():
            live[...] = before

    return restore


def _tensor(live: Tensor) -> Restore:
    """A function that restores a tensor's numbers and its gradient."""
    grad = live.grad if live.is_leaf else None
    empty = live.is_meta or isinstance(live, compat.FakeTensor)
    empty = empty or nn.parameter.is_lazy(live)
    value = None if empty else live.detach().clone()

    def restore() -> None:
        if live.is_leaf and live.grad is not grad:
            live.grad = grad
        if value is None or _same(live, value):
            return
        # Outside of inference mode, `inference_mode(False)` turns gradients on.
        with torch.inference_mode(live.is_inference()), torch.no_grad():
            # A lazy or resized tensor is not refilled by `copy_`, which broadcasts or
            # raises.
            if live.shape != value.shape:
                live.data = value
            else:
                live.copy_(value)

    return restore


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    try:
        return bool(torch.equal(_bits(one), _bits(other)))
    except (RuntimeError, NotImplementedError):  # sparse, quantised: written back
        return False


def _bits(tensor: Tensor) -> Tensor:
    # Bits are compared, since a buffer with a NaN is not equal to itself.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
