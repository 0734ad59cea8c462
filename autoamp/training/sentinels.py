"""Notices writes to a weight, so that its low copies are refreshed.

A sentinel is a copy-on-write clone of a weight.  The first write to the weight, through
any alias, moves the weight's data to a new address, which shows that its copies are
stale (`weight_copies.py`).
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

STEPS = 8
"""After so many steps in a row with one call each, copies get no sentinels."""

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
        low: the copy.
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
        read_twice: whether more than one call has read the copy since its last refresh.
        steps: how many steps in a row had no more than one such call before them.
        once_a_step: the group in which the copy is refreshed after each step; None
            where the copy is looked at by itself.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        low: torch.dtype,
        layout: torch.memory_format = AS_THE_WEIGHT,
    ) -> None:
        self.dtype, self.layout = low, layout
        self.take_memory(weight)
        self.memory: compat.Memory | None = None
        self.version = -1
        self.address: Hashable = -1
        self.sentinel: torch.Tensor | None = None
        self.from_training = False
        self.chances = CHANCES
        self.trainer: int | None = None
        self.captured = self.read_twice = False
        self.steps = 0
        self.once_a_step: OnceAStep | None = None

    def take_memory(self, weight: torch.Tensor) -> None:
        """Gives the copy new memory; memory that was handed out stays as it is."""
        form = self.layout
        self.low = torch.empty_like(weight, dtype=self.dtype, memory_format=form)
        self._alone = compat.holders(self.low)

    @property
    def is_held(self) -> bool:
        """Whether a graph, or a call, may still read the copy's present content."""
        return compat.holders(self.low) > self._alone

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
        return self.watch and self.training and self.copy.steps >= STEPS


class OnceAStep:
    """The copies of one graph that is called once between two steps: no sentinel pays.

    A sentinel keeps a copy until the next write, over many calls.  A training without
    micro-batches makes one call between two steps, so each call has to refresh the
    copies in any case, and a sentinel would be made only to be dropped.  After several
    such steps a graph's copies get no sentinels any more: the step announces its write,
    and the next call refreshes all of them by one multi-tensor copy, whose lists were
    made before.

    Whatever is different (a second call before a step, another graph or thread, a
    weight in other memory, a copy that is still held) ends this, and each copy is
    looked at by itself again, as one that has no sentinel: it is refreshed.

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
        """Args: `stale` are those of `copies` that were just refreshed.

        The caller holds none of the copies' tensors, because holders are counted here.
        """
        self.announced = False
        self.count = len(stale)
        self.devices = devices
        self._addresses = addresses
        self._trainer = threading.get_ident()
        self._refreshed = [each.copy for each in stale]
        ids = {id(copy) for copy in self._refreshed}
        self._at = [at for at, copy in enumerate(copies) if id(copy) in ids]
        self._versions = [copy.version for copy in self._refreshed]
        self._lows = [copy.low for copy in copies]
        self._holders = compat.Holders([copy.low for copy in self._refreshed])
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
        """Refreshes the copies in place; empty where some copy is held, or all ended.

        The caller has switched gradients off, and holds the lock.
        """
        # A held copy ends the group: each copy must then be looked at by itself.
        if not self._lows or self._holders.have_grown:
            return []
        lows, copies = [*self._lows], self._refreshed
        written = [weights[at] for at in self._at]
        self._versions = [*map(compat.version, written)]
        self.announced = False
        _write(copies, written)
        return lows

    def end(self) -> None:
        """Has each copy looked at by itself from now on."""
        PLANS.clear()
        for copy, version in zip(self._refreshed, self._versions, strict=True):
            copy.once_a_step, copy.version, copy.steps = None, version, 0
        self._refreshed, self._lows, self.announced = [], [], False
        self._holders = compat.Holders([])


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
        copy.sentinel = None
        copy.chances -= copy.from_training
        copy.steps = 0


def drop(weight: torch.Tensor, copies: Sequence[Copy]) -> None:
    """Takes a weight's sentinels away: its copies are stale, its memory is plain."""
    if any(copy.sentinel is not None for copy in copies):
        STEADY.clear()
        for copy in copies:
            copy.sentinel = None
        # The storage stays copy-on-write after its clone is gone, until a write; two
        # threads that write at once would both make it plain.
        compat.end_lazy_clone(weight)


def refresh(stale: Sequence[Stale]) -> None:
    """Copies weights into their copies; notes each weight's version and address.

    The caller has switched gradients off, so that no clone belongs to a graph.
    """
    for copy, weight, *_ in stale:
        version = compat.version(weight)
        # A graph whose backward has yet to run has saved the copy: it keeps its memory,
        # and the copy takes new memory.
        if copy.memory is not None and copy.is_held:
            if version != copy.version:  # the holder's backward must raise, as in eager
                torch.autograd.graph.increment_version(copy.low)
            copy.take_memory(weight)
        copy.version, copy.read_twice = version, False
    _write([each.copy for each in stale], [each.weight for each in stale])
    for copy, weight, watch, training in stale:
        _follow(copy, weight)
        if watch and compat.held_alone(weight):
            copy.sentinel = compat.lazy_clone(weight)
            copy.address = compat.data_address(weight)
            copy.from_training = training


def _write(copies: Sequence[Copy], weights: Sequence[torch.Tensor]) -> None:
    """Copies weights into the memory of their copies."""
    laid = [copy.layout is not AS_THE_WEIGHT for copy in copies]
    if not any(laid):
        compat.copy_all([copy.low for copy in copies], weights)
        return
    for permuted in (False, True):  # GPUs copy many tensors at once if none is permuted
        alike = [at for at, each in enumerate(laid) if each == permuted]
        sources = [weights[at] for at in alike]
        if permuted:  # CPUs permute and convert sooner in two passes
            dtype = copies[0].dtype
            sources = [w.to(dtype) if w.is_cpu else w for w in sources]
        if alike:
            compat.copy_all([copies[at].low for at in alike], sources)


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
