"""Notices writes to a weight, so that its low copies are refreshed.

A sentinel is a copy-on-write clone of a weight.  The first write to the weight, through
any alias, moves the weight's data to a new address, which shows that its copies are
stale (`weight_copies.py`).  A stale copy is never read again, so that its memory is
held as long as its sentinel lives.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES

# NOTE: why a clone, and not the version of the weight.
#
# `weight.data.copy_(average)` moves neither the version of the weight nor its pointer.
# A script that evaluates averaged weights and puts its own back would train on the
# average: between the two forwards nothing else has happened.  PEFT's merged adapters
# and pruning write to frozen weights in the same way.  A checksum reads every weight at
# every call.  The clone shares the memory until somebody writes, so it costs a pointer,
# and the first write through any alias moves the weight, which a look at its address
# shows.  Aliases of NumPy and DLPack that were taken before the clone are its blind
# spot; those that are taken later move the weight without need, which costs one copy.

CHANCES = 2
"""After this many unannounced writes in training, a copy has no sentinel any more."""

AS_THE_WEIGHT = torch.preserve_format
"""The memory format of a copy that is laid out as its weight."""

_LAYOUTS = (AS_THE_WEIGHT, torch.channels_last, torch.channels_last_3d)
"""The memory formats that copies may have."""

_LEAST_LAID_OUT = 4
"""Dimensions from which on a weight may have copies of another layout than its own."""

_SEVERAL = -1
"""Stands for more than one thread, in place of a thread's id."""


class Copy:
    """One copy, and the state of its weight at the last refresh.

    Attributes:
        kept: the copy while it has a sentinel; graphs hold the others.
        layout: the memory format of the copy.
        memory: the weight's memory; the copy is dropped when the memory is freed; None
            before the first refresh.
        version: the weight's version.
        address: the address of the weight's data.
        sentinel: a copy-on-write clone of the weight, which shows any write to the
            weight; None where the copy is stale.
        from_training: whether the sentinel was made where a gradient was recorded.
        chances: unannounced writes that remain until the copy loses its sentinel.
        trainer: the thread that trains the weight; None where no thread has so far.
        captured: whether a CUDA graph holds the weight's address.
        read_twice: whether more than one call has read the copy since the last write.
        read_once: whether no more than one such call came before the last step.
        once_a_step: the group in which the copy is refreshed after each step; None
            where the copy is looked at by itself.
    """

    def __init__(
        self,
        low: torch.dtype,
        layout: torch.memory_format = AS_THE_WEIGHT,
    ) -> None:
        self.dtype, self.layout = low, layout
        self.kept: torch.Tensor | None = None
        self._counter: torch.Tensor | None = None
        self.memory: compat.Memory | None = None
        self.version = -1
        self.address: Hashable = -1
        self.sentinel: torch.Tensor | None = None
        self.from_training = False
        self.chances = CHANCES
        self.trainer: int | None = None
        self.captured = self.read_twice = False
        self.read_once = True
        self.once_a_step: OnceAStep | None = None

    def take_memory(self, weight: torch.Tensor, *, plain: bool) -> torch.Tensor:
        """New memory for the copy; memory that was given before stays as it is.

        A graph whose backward has still to run holds what it was given.  Its backward
        raises, as in eager PyTorch, where the weight was written to.

        Args:
            plain: whether no transform of functorch is active, in which the data of
                tensors cannot be exchanged.
        """
        version = compat.version(weight)
        if self._counter is not None and version != self.version:
            torch.autograd.graph.increment_version(self._counter)
        low = torch.empty_like(weight, dtype=self.dtype, memory_format=self.layout)
        self.version = version
        self._counter = compat.version_counter(low) if plain else None
        return low

    def let_go(self) -> None:
        """Ends the sentinel, and the memory of the copy unless a graph holds it."""
        self.sentinel = self.kept = None

    def look_alone(self) -> None:
        """Ends the group in which the copy is refreshed, if there is one."""
        if self.once_a_step is not None:
            self.once_a_step.end()


COPIES: dict[torch.dtype, dict[Hashable, Copy]] = {d: {} for d in LOW_DTYPES.values()}
"""All copies of the process by `key_of` their weight, shared by models and graphs."""


def key_of(weight: torch.Tensor, layout: torch.memory_format) -> Hashable:
    """The key of the copy of a weight in a layout.

    The copy belongs to the weight's memory and not to the tensor: a library that loads
    weights for each call makes new tensors of the same memory again and again.
    """
    return compat.region_of(weight), layout


def copies_of(weight: torch.Tensor) -> list[Copy]:
    """The copies of a weight, in every low dtype and layout."""
    layouts = _LAYOUTS if weight.dim() >= _LEAST_LAID_OUT else _LAYOUTS[:1]
    keys = [key_of(weight, layout) for layout in layouts]
    copies = [store.get(key) for store in COPIES.values() if store for key in keys]
    return [copy for copy in copies if copy is not None]


@dataclass(eq=False)
class Steady:
    """The copies that one graph was given last, while all their sentinels live.

    While the sentinels live, a weight at an unchanged address has not been written to.
    """

    addresses: list[Hashable]
    copies: list[Copy]
    lows: list[torch.Tensor]
    trainer: int | None
    devices: set[torch.device]
    _read_twice: bool = False

    def give_again(self) -> list[torch.Tensor]:
        """The copies for one more call."""
        if not self._read_twice:
            self._read_twice = True
            for copy in self.copies:
                copy.read_twice = True
        return self.lows


STEADY: dict[int, Steady] = {}
"""The `Steady` of each `WeightCopies`, by its id; emptied whenever a sentinel goes."""

PLANS: dict[tuple[int, ...], tuple[set[OnceAStep], list[int]]] = {}
"""The copies that learn of an announced write, by the ids of the tensors written to, in
order: the groups of copies that are refreshed after each step, and the positions of the
tensors that have other copies.  Emptied whenever a copy is made or dropped, and a group
made or ended."""


class Stale(NamedTuple):
    """A copy to refresh, and its weight.

    Attributes:
        watch: whether the refreshed copy may have a sentinel.
        training: whether a gradient is being recorded for the weight.
    """

    copy: Copy
    weight: torch.Tensor
    watch: bool
    training: bool

    @property
    def is_needed_once(self) -> bool:
        """Whether the copy is refreshed after each step, and given to one call then."""
        return self.watch and self.training and self.copy.read_once


class OnceAStep:
    """The copies of one graph that is called once between two steps: no sentinel pays.

    A sentinel keeps a copy until the next write, over many calls.  A training without
    micro-batches makes one call between two steps, so each call has to refresh the
    copies in any case: a sentinel would be made only to be dropped, and the copies
    would be held after the backward, when nobody reads them.  So training begins
    without sentinels: the step announces its write, and the next call refreshes all
    copies by one multi-tensor copy, whose lists were made before.

    Whatever is different (a second call before a step, another graph or thread, a
    weight in other memory) ends this, and each copy is looked at by itself, as one that
    has no sentinel: it is refreshed.  A step with one call before it begins this again.

    Attributes:
        announced: whether a write to weights was announced after the last call.
        count: how many copies each call refreshes; the others have sentinels.
        devices: the devices of the weights.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        stale: Sequence[Stale],
        addresses: list[Hashable],
        devices: set[torch.device],
    ) -> None:
        """Args: `stale` are those of `copies` that were just refreshed."""
        self.announced = False
        self.count = len(stale)
        self.devices = devices
        self._addresses = addresses
        self._trainer = threading.get_ident()
        self._refreshed = [each.copy for each in stale]
        ids = {id(copy) for copy in self._refreshed}
        self._at = [at for at, copy in enumerate(copies) if id(copy) in ids]
        self._copies = copies
        PLANS.clear()
        for copy in self._refreshed:
            copy.once_a_step = self

    def may_refresh(self, addresses: list[Hashable]) -> bool:
        """Whether a call of this thread, at these addresses, may refresh all copies."""
        return (
            self.announced
            and addresses == self._addresses
            and self._trainer == threading.get_ident()
            and torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
        )

    def refresh(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Fresh copies; empty where all ended, or one that should be kept is not.

        The caller has switched gradients off, and holds the lock.
        """
        self.announced = False
        others = [copy.kept for copy in self._copies]
        if sum(low is None for low in others) != self.count:
            return []
        made = iter(_made(self._refreshed, [weights[at] for at in self._at]))
        return [next(made) if low is None else low for low in others]

    def end(self) -> None:
        """Has each copy looked at by itself from now on."""
        PLANS.clear()
        for copy in self._refreshed:
            copy.once_a_step, copy.read_once = None, False
            copy.read_twice = not self.announced
        self._refreshed, self._copies, self.announced = [], [], False


def note_captured(weights: Iterable[torch.Tensor]) -> None:
    """Notes that a CUDA graph holds the addresses of `weights` from now on."""
    for weight in weights:
        if weight.is_cuda:
            copies = copies_of(weight)
            drop(weight, copies)
            for copy in copies:
                copy.look_alone()
                copy.captured = True


def may_watch(copy: Copy, training: bool) -> bool:
    """Whether a copy may have, or keep, a sentinel.

    A copy has none where its weight is trained and written to unannounced, because each
    such write would cost a copy of the weight.  A copy has none either where several
    threads train the weight: two threads that write at once would both make the clone
    real.
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


def note_a_write(copy: Copy, weight: torch.Tensor) -> None:
    """Takes away the sentinel, and one chance, of a copy whose weight was written to.

    A chance is lost only by a sentinel made in training.
    """
    # The first write to a storage that has a copy-on-write clone moves the weight's
    # data, so that the address tells of a write through any alias.
    if copy.sentinel is not None and compat.data_address(weight) != copy.address:
        STEADY.clear()
        copy.let_go()
        copy.chances -= copy.from_training
        copy.read_once = copy.read_twice = False


def drop(weight: torch.Tensor, copies: Sequence[Copy]) -> None:
    """Takes a weight's sentinels away: its copies are stale, its memory is plain."""
    if any(copy.sentinel is not None for copy in copies):
        STEADY.clear()
        for copy in copies:
            copy.let_go()
        # The storage stays copy-on-write after its clone is gone, until a write; two
        # threads that write at once would both make it plain.
        compat.end_lazy_clone(weight)


def refresh(stale: Sequence[Stale]) -> list[torch.Tensor]:
    """Copies weights into new memory; notes each weight's version and address.

    The caller has switched gradients off, so that no clone belongs to a graph.
    """
    lows = _made([each.copy for each in stale], [each.weight for each in stale])
    for (copy, weight, watch, training), low in zip(stale, lows, strict=True):
        _follow(copy, weight)
        if watch and compat.held_alone(weight):
            copy.sentinel = compat.lazy_clone(weight)
            copy.kept = None if copy.sentinel is None else low
            copy.address = compat.data_address(weight)
            copy.from_training = training
    return lows


def _made(
    copies: Sequence[Copy], weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The weights in new memory of their copies."""
    plain = not compat.transforms_active()
    pairs = zip(copies, weights, strict=True)
    lows = [copy.take_memory(weight, plain=plain) for copy, weight in pairs]
    if not lows:
        return lows
    laid = [copy.layout is not AS_THE_WEIGHT for copy in copies]
    if not any(laid):
        compat.copy_all(lows, weights)
        return lows
    for permuted in (False, True):  # GPUs copy many tensors at once if none is permuted
        alike = [at for at, each in enumerate(laid) if each == permuted]
        sources = [weights[at] for at in alike]
        if permuted:  # CPUs permute and convert sooner in two passes
            dtype = copies[0].dtype
            sources = [w.to(dtype) if w.is_cpu else w for w in sources]
        if alike:
            compat.copy_all([lows[at] for at in alike], sources)
    return lows


def _follow(copy: Copy, weight: torch.Tensor) -> None:
    """Drops the copy once the memory that its weight is in now is freed."""
    if copy.memory is not None and compat.lies_in(weight, copy.memory):
        return
    store, key = COPIES[copy.dtype], key_of(weight, copy.layout)

    def forget(memory: compat.Memory) -> None:
        known = store.get(key)
        if known is not None and known.memory is memory:
            STEADY.clear()
            known.look_alone()
            PLANS.clear()
            del store[key]

    copy.memory = compat.watch_memory(weight, (copy.dtype, key), forget)
