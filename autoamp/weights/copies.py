"""Low-precision copies of weights: made once, refreshed when the weight changed.

The user's fp32 parameter stays the master.  A rewritten graph gets the copy as an extra
argument, looked up at run time by the parameter it is called with: deep copies of a
model share graphs, not weights.

Beside each copy lives a *sentinel*, a copy-on-write clone of the weight.  While it
lives, any write to the weight, by whatever name, moves the weight's data to a new
address: so the copy is kept exactly until then, in training over all micro-batches of a
step.  The move costs a copy of the weight; `before_write` spares it where the write is
announced.  Weights whose memory somebody else may hold a pointer to have no sentinel.

A stale copy is refreshed where it is, unless somebody holds it yet: a graph that has
still to run backward, a call in another thread.  Theirs stays as it was, and the copy
gets new memory.  (Where eager's backward would raise, because the weight itself was
written to and not its `.data`, that of such a graph does.)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autoamp import compat

_CHANCES = 2
"""Unannounced writes in training after which a weight's copy loses its sentinel."""


class _Copy:
    """One copy, and what its weight looked like when it was last refreshed.

    Attributes:
        low: the copy.
        memory: that of the weight, with which the copy goes; None before the first
            refresh.
        version: of the weight.
        address: of the weight's data.
        sentinel: a copy-on-write clone of the weight, which tells any write to it;
            None: the copy is stale.
        from_training: whether the sentinel was made where a gradient was recorded.
        chances: unannounced writes left until there is no sentinel in training.
        trainer: the thread that trains the weight; None where none did so far.
        captured: whether a CUDA graph holds the weight's address.
    """

    def __init__(self, weight: torch.Tensor, low: torch.dtype) -> None:
        self.dtype = low
        self.take_memory(weight)
        self.memory: compat.Memory | None = None
        self.version = -1
        self.address: Hashable = -1
        self.sentinel: torch.Tensor | None = None
        self.from_training = False
        self.chances = _CHANCES
        self.trainer: int | None = None
        self.captured = False

    def take_memory(self, weight: torch.Tensor) -> None:
        """Gives the copy memory of its own; what was handed out stays as it is."""
        self.low = torch.empty_like(weight.detach(), dtype=self.dtype)
        self._alone = self._holders()

    @property
    def is_held(self) -> bool:
        """Whether a graph, or a call, may read what is in the copy now."""
        return self._holders() > self._alone

    def _holders(self) -> int:
        return compat.holders(self.low)


@dataclass(eq=False, frozen=True)
class _Steady:
    """What one graph was given last, while the sentinels of all of it live.

    An equal address is the same unwritten memory then, whichever tensor shows it.
    """

    addresses: list[Hashable]
    lows: list[torch.Tensor]
    trainer: int | None
    devices: set[torch.device]


_COPIES: dict[torch.dtype, dict[int, _Copy]] = {torch.float16: {}, torch.bfloat16: {}}
"""All copies of the process by the id of their weight, shared by models and graphs."""

_steady: weakref.WeakKeyDictionary[WeightCopies, _Steady] = weakref.WeakKeyDictionary()
"""Emptied whenever a sentinel goes."""

_SEVERAL = -1
"""In place of a thread: more than one."""

# One thread at a time: a second one must see that the first has moved the version.
_lock = threading.Lock()


class WeightCopies:
    """The copies one graph needs, fresh at every call.

    Attributes:
        kept: copies are kept until their weight is written to; False: each call makes
            its own, and no weight has a sentinel.
        refreshed: how many copies were made equal to their weight again so far.
        unwatched: how many weights had no sentinel after the last call that looked at
            each: the next copies them again.
    """

    def __init__(self, low: torch.dtype, *, kept: bool = True) -> None:
        self.low = low
        self.kept = kept
        self.refreshed = 0
        self.unwatched = 0

    def fresh(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of `weights` (fp32, any shapes) in the low dtype, equal to them now.

        Those that are not are refreshed by one multi-tensor copy.  What was handed out
        before is not written to while somebody may read it.
        """
        steady = _steady.get(self)
        if (
            steady is not None
            and compat.data_addresses(weights) == steady.addresses
            and (steady.trainer == threading.get_ident() or not torch.is_grad_enabled())
            and not any(map(_on_side_stream, steady.devices))
        ):
            return steady.lows
        del steady  # it holds the copies, and is to be the last that does
        recording = torch.is_grad_enabled()
        # Made under inference_mode a copy could not be saved for a backward.
        with _no_inference_mode(), torch.no_grad():
            return self._checked(weights, recording)

    def _checked(
        self, weights: Sequence[torch.Tensor], recording: bool
    ) -> list[torch.Tensor]:
        """As `fresh`, each weight looked at by itself."""
        devices = {weight.device for weight in weights}
        aside = any(map(_on_side_stream, devices))
        if aside and _capturing():
            return self._for_cuda_graph(weights)
        copies = [self._find(weight) for weight in weights]
        stale: list[_Stale] = []
        with _lock:
            for copy, weight in zip(copies, weights, strict=True):
                training = recording and weight.requires_grad
                _note_a_write(copy, weight)
                watch = self.kept and not aside and _may_watch(copy, training)
                if not watch:
                    _drop(weight, _copies_of(weight))
                if copy.sentinel is None:
                    stale.append(_Stale(copy, weight, watch, training))
            if stale:
                self.refreshed += len(stale)
                _refresh(stale)
            lows = [copy.low for copy in copies]
            self.unwatched = sum(copy.sentinel is None for copy in copies)
            if not self.unwatched:
                trainer = threading.get_ident() if recording else None
                addresses = [copy.address for copy in copies]
                _steady[self] = _Steady(addresses, lows, trainer, devices)
        return lows

    def _find(self, weight: torch.Tensor) -> _Copy:
        """The copy of a weight; a new one where it has none of its layout.

        It may have been that of a weight which is gone and had the same `id`: what has
        no sentinel is refreshed, and a sentinel is of an address.
        """
        store = _COPIES[self.low]
        copy = store.get(id(weight))
        # `p.data = other` may change shape, strides or device of the same object.
        if copy is None or not _same_layout(copy.low, weight):
            copy = store[id(weight)] = _Copy(weight, self.low)
        return copy

    def _for_cuda_graph(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in the memory of the CUDA graph that is being captured.

        It writes them again at each replay, from where the weights are now.
        """
        with _lock:
            lows = [torch.empty_like(w.detach(), dtype=self.low) for w in weights]
            compat.copy_all(lows, weights)
            _note_captured(weights)
        self.refreshed += len(lows)
        return lows


def before_write(parameters: Iterable[torch.Tensor]) -> None:
    """Announces that a step is about to write to `parameters`, which spares a copy.

    The sentinels of those that are trained go, and with them what a write would cost;
    their copies are refreshed by the next call that needs them.  Frozen ones keep
    theirs: a step leaves them alone, and a write is seen all the same.
    """
    if not any(_COPIES.values()):
        return
    with _lock:
        if _capturing():  # its replays will not be announced
            _note_captured(parameters)
            return
        for weight in parameters:
            copies = _copies_of(weight)
            for copy in copies:
                _note_a_write(copy, weight)
                if copy.sentinel is None:
                    copy.chances = copy.chances or 1
                elif weight.requires_grad:
                    copy.chances = _CHANCES
                    _drop(weight, copies)


class _Stale(NamedTuple):
    """A copy to refresh, its weight, and whether it may have a sentinel then."""

    copy: _Copy
    weight: torch.Tensor
    watch: bool
    training: bool


def _copies_of(weight: torch.Tensor) -> list[_Copy]:
    """The copies of a weight, in every low dtype."""
    found = [store.get(id(weight)) for store in _COPIES.values()]
    return [copy for copy in found if copy is not None]


def _note_captured(weights: Iterable[torch.Tensor]) -> None:
    """A CUDA graph holds the addresses of `weights` from now on."""
    for weight in weights:
        if weight.is_cuda:
            copies = _copies_of(weight)
            _drop(weight, copies)
            for copy in copies:
                copy.captured = True


def _same_layout(low: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        low.shape == weight.shape
        and low.device == weight.device
        and (
            low.stride() == weight.stride()
            or low.stride() == torch.empty_like(weight, device="meta").stride()
        )
    )


def _may_watch(copy: _Copy, training: bool) -> bool:
    """Whether a copy may have a sentinel, and may keep the one it has.

    Not where the weight is trained and its writes come unannounced: each would cost a
    copy of the weight.  Nor where several threads train it: two that write at once
    would both make the clone real.
    """
    if training:
        thread = threading.get_ident()
        if copy.trainer is None:
            copy.trainer = thread
        elif copy.trainer != thread and not compat.inside_backward():
            copy.trainer = _SEVERAL
        if copy.trainer == _SEVERAL or not copy.chances:
            return False
    return not copy.captured


def _note_a_write(copy: _Copy, weight: torch.Tensor) -> None:
    """Takes the sentinel of a copy whose weight was written away, and one chance."""
    if copy.sentinel is not None and compat.data_address(weight) != copy.address:
        _steady.clear()
        copy.sentinel = None
        copy.chances -= copy.from_training


def _drop(weight: torch.Tensor, copies: Sequence[_Copy]) -> None:
    """Takes a weight's sentinels away: its copies are stale, its memory plain."""
    if any(copy.sentinel is not None for copy in copies):
        _steady.clear()
        for copy in copies:
            copy.sentinel = None
        compat.end_lazy_clone(weight)


def _refresh(stale: Sequence[_Stale]) -> None:
    """Copies weights into their copies, and notes what they look like."""
    for copy, weight, *_ in stale:
        version = compat.version(weight)
        if copy.memory is not None and copy.is_held:
            if version != copy.version:  # then the holder's backward raises, as eager's
                torch.autograd.graph.increment_version(copy.low)
            copy.take_memory(weight)
        copy.version = version
    compat.copy_all([s.copy.low for s in stale], [s.weight for s in stale])
    for copy, weight, watch, training in stale:
        _follow(copy, weight)
        if watch and compat.held_alone(weight):
            copy.sentinel = compat.lazy_clone(weight.detach())
            copy.address = compat.data_address(weight)
            copy.from_training = training


def _follow(copy: _Copy, weight: torch.Tensor) -> None:
    """Lets the copy go when the memory goes in which its weight is now."""
    if copy.memory is not None and compat.lies_in(weight, copy.memory):
        return
    store, key = _COPIES[copy.dtype], id(weight)

    def forget(memory: compat.Memory) -> None:
        known = store.get(key)
        if known is not None and known.memory is memory:
            _steady.clear()
            del store[key]

    copy.memory = compat.watch_memory(weight, (copy.dtype, key), forget)


def _capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    cuda = torch.cuda
    return cuda.is_initialized() and cuda.is_current_stream_capturing()


def _on_side_stream(device: torch.device) -> bool:
    """Whether `device` is a GPU and the current stream is not its default one.

    A lazy clone is made real on the default stream, whatever the current one is; and
    what CUDA graphs capture, always on another, holds addresses.
    """
    if device.type != "cuda":
        return False
    current = torch.cuda.current_stream(device)
    return bool(current != torch.cuda.default_stream(device))


def _no_inference_mode() -> AbstractContextManager[object]:
    """What is made or written inside can be saved for a backward later."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return nullcontext()
