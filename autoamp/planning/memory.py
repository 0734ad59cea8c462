"""Counts the memory of one step on fake tensors, which take no memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.counted.ops import storage_key
from autoamp.counted.saved import kept_by_functions
from autoamp.dtypes import LOW_DTYPES

_Key = tuple[str, int]


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step, without weights.

    Attributes:
        saved: tensors kept for the backward, without weights and their low copies.
        copies: low copies of weights at the end of the forward.
        most: the most held at one time, including low copies and gradients.
    """

    saved: int
    copies: int
    most: int


def step_memory(
    forward: Callable[[], Tensor],
    region: contextlib.AbstractContextManager[Any],
    weights: Iterable[Tensor],
    given: Iterable[Tensor],
    copies: Iterable[Tensor] = (),
    *,
    trains: bool,
) -> StepMemory:
    """The memory of a forward and, if `trains`, its backward.

    Args:
        forward: gives the loss.
        region: the region, such as autocast's, that the forward runs in.
        weights: weights and buffers, which exist before the step.
        given: the arguments of the call, which exist before the step.
        copies: low copies of weights that exist before the step.
    """
    return counted_step(forward, region, Allocated(weights, given, copies), trains)


def counted_step(
    forward: Callable[[], Tensor],
    region: contextlib.AbstractContextManager[Any],
    counted: Allocated,
    trains: bool,
) -> StepMemory:
    """The memory of a forward and, if `trains`, its backward, as `counted` follows it.

    Args:
        forward, region: as for `step_memory`.
        counted: follows what ops allocate.
    """
    saved: dict[_Key, int] = {}

    def note(tensor: Tensor) -> None:
        tensor = own_part(tensor)
        saved.setdefault(storage_key(tensor), tensor.untyped_storage().nbytes())

    def pack(tensor: Tensor) -> Tensor:
        note(tensor)
        return tensor.detach()  # an op that saved its own result would hold itself

    with counted, torch.set_grad_enabled(trains):
        with region:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                loss = forward()
            low = dict(counted.copies)  # autocast drops its copies at the region's end
        for tensor in kept_by_functions(loss):
            note(tensor)
        if trains:
            loss.backward()
    kept = sum(
        size
        for key, size in saved.items()
        if key not in low and key not in counted.before
    )
    return StepMemory(kept, sum(low.values()), counted.most)


class Allocated(compat.CountingDispatch):
    """Follows the storages that ops allocate, until they are freed.

    Of a DTensor the part of this rank counts, which the ops inside it make.

    Attributes:
        weights: the storages of weights.
        before: the storages that existed before, including those of weights.
        copies: bytes of the storages of low copies of weights that are held now.
        most: the most bytes that were held at one time, including low copies.
        now: the bytes that are held now, including low copies.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        given: Iterable[Tensor],
        copies: Iterable[Tensor],
    ) -> None:
        super().__init__()
        self.weights = {storage_key(own_part(each)) for each in weights}
        self.before = self.weights | {storage_key(own_part(each)) for each in given}
        self.copies: dict[_Key, int] = {}
        self._known = set(self.before)
        self.now = self.most = 0
        for each in copies:
            self._note(own_part(each), is_copy=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(map(compat.is_distributed_type, types)):
            return (
                NotImplemented  # the ops on this rank's parts come here by themselves
            )
        result = func(*args, **(kwargs or {}))
        is_copy = (
            func is torch.ops.aten._to_copy.default
            and result.dtype in LOW_DTYPES.values()
            and storage_key(args[0]) in self.weights
        )
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor):
                self._note(each, is_copy=is_copy)
        return result

    def _note(self, tensor: Tensor, *, is_copy: bool) -> None:
        key = storage_key(tensor)
        if key in self._known:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._known.add(key)
        if is_copy:
            self.copies[key] = size
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: _Key, size: int) -> None:
        self.now -= size
        self._known.discard(key)
        self.copies.pop(key, None)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or `tensor` itself."""
    with torch.no_grad():
        return compat.local_part(tensor)
