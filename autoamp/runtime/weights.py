"""Low-precision copies of weights: made once, refreshed when the weight changed.

The user's fp32 parameter stays the master.  A rewritten graph gets the copy as an extra
argument, looked up at run time by the parameter it is called with: deep copies of a
model share graphs, not weights.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autoamp import compat


@dataclass
class _Copy:
    """One copy, and what its weight looked like when it was last refreshed.

    Attributes:
        low: the copy, whose version counter autograd watches.
        writable: the same memory with another counter.
        version, address: of the weight.
        sentinel: a copy-on-write clone of the weight, which tells any write to it.
    """

    low: torch.Tensor
    writable: torch.Tensor
    version: int = -1
    address: int = -1
    sentinel: torch.Tensor | None = None


_COPIES: dict[torch.dtype, WeakTensorKeyDictionary] = {
    torch.float16: WeakTensorKeyDictionary(),
    torch.bfloat16: WeakTensorKeyDictionary(),
}
"""All copies of the process: a weight shared by two models or graphs has one."""

# One thread at a time: a second one must see that the first has moved the version.
_lock = threading.Lock()


class WeightCopies:
    """The copies one graph needs, fresh at every call.

    Attributes:
        refreshed: how many copies were made equal to their weight again so far.
    """

    def __init__(self, low: torch.dtype) -> None:
        self.low = low
        self.refreshed = 0
        self._store = _COPIES[low]
        # By id, checked by the weak reference: many times faster than the store.
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], _Copy]] = {}

    def fresh(self, weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of `weights` (fp32, any shapes) in the low dtype, equal to them now.

        A weight being trained is copied anew at every call, all of them by one
        multi-tensor copy: `.data` writes leave no trace that could be trusted.  Where
        no gradient is recorded a copy-on-write clone of the weight tells any write, so
        the copy is kept until then.
        """
        recording = torch.is_grad_enabled()
        lows: list[torch.Tensor] = []
        stale: list[tuple[_Copy, torch.Tensor]] = []
        for weight in weights:
            known = self._known.get(id(weight))
            copy = known[1] if known and known[0]() is weight else self._find(weight)
            lows.append(copy.low)
            if (recording and weight.requires_grad) or _moved(copy, weight):
                stale.append((copy, weight))
        if stale:
            self.refreshed += len(stale)
            with _lock:
                _refresh(stale, recording)
        return lows

    def _find(self, weight: torch.Tensor) -> _Copy:
        """The copy of a weight this graph has not met yet."""
        copy: _Copy | None = self._store.get(weight)
        if copy is None or not _same_layout(copy.low, weight):
            # `p.data = other` may change shape, strides or device of the same object.
            # (And made under inference_mode it could not be saved for a backward.)
            with _no_inference_mode(), torch.no_grad():
                low = torch.empty_like(weight.detach(), dtype=self.low)
            copy = self._store[weight] = _Copy(low, low.data)
        known, key = self._known, id(weight)
        known[key] = (weakref.ref(weight, lambda _: known.pop(key, None)), copy)
        return copy


def _same_layout(low: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        low.shape == weight.shape
        and low.stride() == torch.empty_like(weight, device="meta").stride()
        and low.device == weight.device
    )


def _moved(copy: _Copy, weight: torch.Tensor) -> bool:
    return (
        copy.sentinel is None
        or copy.version != _version(weight)
        or compat.data_address(weight) != copy.address
    )


def _version(weight: torch.Tensor) -> int:
    try:
        return weight._version
    except RuntimeError:  # made under inference_mode: it has none
        return -1


def _refresh(stale: Sequence[tuple[_Copy, torch.Tensor]], recording: bool) -> None:
    """Copies weights into their copies, in place, and notes what they look like.

    A copy may be saved by a graph that has yet to run backward.  Its version counter
    moves only if the weight's own did: exactly when eager autograd would complain.
    """
    with _no_inference_mode(), torch.no_grad():
        compat.copy_all([c.writable for c, _ in stale], [w for _, w in stale])
        for copy, weight in stale:
            version = _version(weight)
            if version != copy.version:
                copy.version = version
                torch.autograd.graph.increment_version(copy.low)
            if recording and weight.requires_grad:
                copy.sentinel = None  # it would cost a copy of the weight per step
            else:
                copy.sentinel = compat.lazy_clone(weight.detach())
                copy.address = compat.data_address(weight)


def _no_inference_mode() -> AbstractContextManager[object]:
    """What is made or written inside can be saved for a backward later."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return nullcontext()
