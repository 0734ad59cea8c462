"""Low-precision copies of weights: made once, refreshed when the weight changed.

The user's fp32 parameter stays the master.  A rewritten graph gets the copy as an extra
argument, looked up at run time by the parameter that the graph is called with, because
deep copies of a model share graphs, not weights.

Beside each copy lives a *sentinel*, a copy-on-write clone of the weight.  While the
sentinel lives, any write to the weight, through any tensor, moves the weight's data to
a new address.  So the copy is kept exactly until the next write: in training, over all
micro-batches of a step.  The move costs a copy of the weight; `before_write` saves the
cost where a write is announced.  A weight whose memory other code may point to has no
sentinel, and neither has a copy that every step makes stale (`OnceAStep`).

A copy's memory is held here as long as its sentinel lives.  A copy without a sentinel
is never read again: the graph that was given it holds it alone, until the backward has
read it.  So no copy lives during the optimizer's step, and each refresh has new memory.
(The backward of an older graph raises where eager PyTorch's would: where the weight
itself was written to, and not its `.data`.)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.training.sentinels import (
    AS_THE_WEIGHT,
    CHANCES,
    COPIES,
    PLANS,
    STEADY,
    Copy,
    OnceAStep,
    Stale,
    Steady,
    copies_of,
    drop,
    key_of,
    may_watch,
    note_a_write,
    note_captured,
    refresh,
)
from autoamp.training.shards import SHARDED

_MOST_PLANS = 64
"""So many plans are kept: more than a program has optimizers."""

# One thread refreshes at a time, so that a second thread sees the versions that the
# first thread has moved.
_lock = threading.Lock()


class WeightCopies:
    """The copies one graph needs, fresh at every call.

    Attributes:
        layouts: the memory format of each copy; empty if each copy lies as its weight.
        kept: whether a copy is kept until its weight is written to; if not, each call
            refreshes all copies, and no weight has a sentinel.
        refreshed: how often a copy was made equal to its weight so far.
        unwatched: how many weights had no sentinel after the last call that looked at
            each weight: the next call copies these weights again.
    """

    def __init__(
        self,
        low: torch.dtype,
        *,
        kept: bool = True,
        layouts: Sequence[torch.memory_format] = (),
    ) -> None:
        self.low = low
        self.layouts = layouts
        self.kept = kept
        self.refreshed = 0
        self.unwatched = 0
        self._once_a_step: OnceAStep | None = None
        weakref.finalize(self, STEADY.pop, id(self), None)

    def fresh(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Up-to-date copies of `weights` (fp32, any shapes) in the low dtype.

        Stale copies are refreshed by one multi-tensor copy.  Memory that was handed out
        before is not written to while other code may still read it.
        """
        addresses = compat.data_addresses(weights)
        group = self._once_a_step
        if (
            group is not None
            and group.may_refresh(addresses)
            and not _aside(group.devices)
        ):
            with _lock, torch.no_grad():
                lows = group.refresh(weights)
            if lows:
                self.refreshed += group.count
                return lows
        steady = STEADY.get(id(self))
        if (
            steady is not None
            and addresses == steady.addresses
            and (steady.trainer == threading.get_ident() or not torch.is_grad_enabled())
            and not _aside(steady.devices)
        ):
            return steady.give_again()
        recording = torch.is_grad_enabled()
        layouts = self.layouts or (AS_THE_WEIGHT,) * len(weights)
        # A copy made under inference_mode could not be saved for a backward.
        is_inference = torch.is_inference_mode_enabled()
        with (
            torch.inference_mode(False) if is_inference else nullcontext(),
            torch.no_grad(),
        ):
            if SHARDED:
                return self._of_shards(weights, layouts, recording)
            return self._checked(weights, layouts, recording)

    def _of_shards(
        self,
        weights: Sequence[torch.Tensor],
        layouts: Sequence[torch.memory_format],
        recording: bool,
    ) -> list[torch.Tensor]:
        """The same as `fresh`, where FSDP has sharded some of the weights.

        A sharded weight is whole for one forward or backward only, and so is its copy:
        if copies were kept, every rank would hold a whole model.
        """
        pairs = [*zip(weights, layouts, strict=True)]
        shards = [SHARDED.of(weight) for weight in weights]
        unsharded = [pair for pair, s in zip(pairs, shards, strict=True) if s is None]
        lows = iter(
            self._checked(
                [w for w, _ in unsharded], [f for _, f in unsharded], recording
            )
        )
        copies = []
        for (weight, layout), shard in zip(pairs, shards, strict=True):
            if shard is None:
                copies.append(next(lows))
            else:
                copies.append(shard.copy(weight, self.low, layout))
        return copies

    def _checked(
        self,
        weights: Sequence[torch.Tensor],
        layouts: Sequence[torch.memory_format],
        recording: bool,
    ) -> list[torch.Tensor]:
        """The same as `fresh`, but looks at each weight by itself."""
        devices = {weight.device for weight in weights}
        aside = _aside(devices)
        if aside and _capturing():
            return self._for_cuda_graph(weights, layouts)
        copies = [*map(self._find, weights, layouts)]
        stale: list[Stale] = []
        kept: list[torch.Tensor | None] = []
        with _lock:
            for copy, weight in zip(copies, weights, strict=True):
                training = recording and weight.requires_grad
                copy.look_alone()
                note_a_write(copy, weight)
                watch = self.kept and not aside and may_watch(copy, training)
                if not watch:
                    drop(weight, copies_of(weight))
                kept.append(copy.kept)
                if copy.kept is None:
                    stale.append(Stale(copy, weight, watch, training))
                else:
                    copy.read_twice = True
            once = bool(stale) and all(each.is_needed_once for each in stale)
            made = refresh([s._replace(watch=False) for s in stale] if once else stale)
            self.refreshed += len(made)
            new = iter(made)
            lows = [next(new) if low is None else low for low in kept]
            if once:
                addresses = compat.data_addresses(weights)
                self._once_a_step = OnceAStep(copies, stale, addresses, devices)
                self.unwatched = 0
                return lows
            self.unwatched = sum(s.copy.sentinel is None for s in stale)
            if not self.unwatched:
                trainer = threading.get_ident() if recording else None
                seen = [copy.address for copy in copies]
                STEADY[id(self)] = Steady(seen, copies, lows, trainer, devices)
        return lows

    def _find(self, weight: torch.Tensor, layout: torch.memory_format) -> Copy:
        """The copy of a weight; a new copy where the weight has none of its layout."""
        store, key = COPIES[self.low], key_of(weight, layout)
        # The copy of freed memory that lay at the same place does no harm: a copy
        # without a sentinel is refreshed, and a sentinel is valid for one address only.
        copy = store.get(key)
        if copy is None:
            copy = store[key] = Copy(self.low, layout)
            PLANS.clear()
        return copy

    def _for_cuda_graph(
        self,
        weights: Sequence[torch.Tensor],
        layouts: Sequence[torch.memory_format],
    ) -> list[torch.Tensor]:
        """Copies in the memory of the CUDA graph that is being captured.

        Each replay of the CUDA graph writes the copies again, from the addresses that
        the weights have now.
        """
        with _lock:
            lows = [
                torch.empty_like(w.detach(), dtype=self.low, memory_format=layout)
                for w, layout in zip(weights, layouts, strict=True)
            ]
            compat.copy_all(lows, weights)
            note_captured(weights)
        self.refreshed += len(lows)
        return lows


class MeshedCopies(WeightCopies):
    """The copies of one graph, some of whose weights are DTensors.

    The memory that a rank holds of a DTensor is a plain tensor, whose copy is made as
    any weight's is, and is then put on the mesh as the weight is.  Where gradients are
    recorded, that memory is copied at every call: a weight that is trained is written
    to after every call, and a sentinel would cost a copy of the weight at each write.
    """

    def __init__(
        self,
        low: torch.dtype,
        *,
        kept: bool = True,
        layouts: Sequence[torch.memory_format] = (),
    ) -> None:
        super().__init__(low, kept=kept, layouts=layouts)
        self._kept = WeightCopies(low, kept=kept)

    def fresh(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Up-to-date copies; the copy of a DTensor is one with the same placements."""
        meshed = [w for w in weights if compat.is_distributed(w)]
        plain = [w for w in weights if not compat.is_distributed(w)]
        memories = [compat.own_memory(w) for w in meshed]
        if torch.is_grad_enabled():
            # A trained DTensor's copy is made at every call, since a sentinel would
            # cost a copy of the weight at each step's write.
            with torch.inference_mode(False), torch.no_grad():
                lows = [torch.empty_like(each, dtype=self.low) for each in memories]
                compat.copy_all(lows, memories)
            self.refreshed += len(lows)
        else:
            lows = self._kept.fresh(memories)
        with torch.no_grad():
            made = map(compat.with_memory, meshed, lows)
            others = iter(super().fresh(plain) if plain else ())
            return [
                next(made) if compat.is_distributed(w) else next(others)
                for w in weights
            ]


def before_write(parameters: Iterable[torch.Tensor]) -> None:
    """Announces that a step is about to write to `parameters`, which saves a copy.

    Trained parameters lose their sentinels, so that the write does not move their data;
    the next call that needs their copies refreshes the copies.  Frozen parameters keep
    their sentinels: a step does not write to them, and any other write is still seen.
    """
    if not any(COPIES.values()):
        return
    parameters = [*parameters]
    with _lock:
        if _capturing():  # the graph's replays will not be announced
            note_captured(parameters)
            return
        ids = tuple(map(id, parameters))
        plan = PLANS.get(ids)
        if plan is None:
            PLANS[ids] = plan = _plan(parameters)
        groups, others = plan
        for group in groups:
            group.announced = True
        for at in others:
            _announce(parameters[at])


def _plan(weights: Sequence[torch.Tensor]) -> tuple[set[OnceAStep], list[int]]:
    """The entry of `PLANS` for `weights`."""
    if len(PLANS) >= _MOST_PLANS:
        PLANS.clear()
    groups: set[OnceAStep] = set()
    others: list[int] = []
    for at, weight in enumerate(weights):
        copies = copies_of(weight)
        found = [c.once_a_step for c in copies if c.once_a_step is not None]
        groups.update(found)
        if len(found) < len(copies):
            others.append(at)
    return groups, others


def _announce(weight: torch.Tensor) -> None:
    """Announces a write to one weight to those of its copies that are by themselves."""
    copies = copies_of(weight)
    for copy in copies:
        note_a_write(copy, weight)
        copy.read_once, copy.read_twice = not copy.read_twice, False
        if copy.sentinel is None:
            copy.chances = copy.chances or 1
        elif weight.requires_grad:
            copy.chances = CHANCES
            drop(weight, copies)


def _capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    cuda = torch.cuda
    return cuda.is_initialized() and cuda.is_current_stream_capturing()


def _aside(devices: Iterable[torch.device]) -> bool:
    """Whether the current stream of one of `devices`, a GPU, is not its default one.

    On another stream a weight has no sentinel: a lazy clone is always made real on the
    default stream, and a CUDA graph, captured on another stream, holds addresses.
    """
    return any(
        device.type == "cuda"
        and torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
        for device in devices
    )


# -- weights in memory that torch cannot watch -----------------------------------------
#
# `from_pretrained` returns tensors that lie in the buffer a file was read into.  Torch
# can make no copy-on-write clone of such memory, so that copies of these weights would
# have no sentinel and be made again at every call.  The weights are therefore moved
# into memory of torch's own, once.
#
# Only models whose config says that they were loaded are treated so.  Memory that a
# program shares with torch (`torch.from_numpy`) looks the same, but a move would cut
# the program off from the weight.

_LOADABLE = frozenset({"PreTrainedModel", "ModelMixin"})
"""The base classes, in transformers and in diffusers, that have `from_pretrained`."""


def own_loaded_weights(model: nn.Module) -> int:
    """Moves the loaded weights of `model` into torch's own memory; returns how many.

    The parameters stay the same objects with the same values.
    """
    modules = compat.modules_of(model)
    loadable = {
        kind
        for kind in set(map(type, modules))
        if hasattr(kind, "from_pretrained")  # quick, and false of most modules
        and not _LOADABLE.isdisjoint(base.__name__ for base in kind.__mro__)
    }
    loaded = [m for m in modules if type(m) in loadable and _was_loaded(m)]
    parameters = {id(p): p for m in loaded for p in nn.Module.parameters(m)}
    moved = [p for p in parameters.values() if _outside_torch(p)]
    for parameter in moved:
        # Through `.data` the parameter stays the same object: optimizers, tied modules
        # and hooks hold it.
        parameter.data = parameter.data.clone()
    return len(moved)


def _was_loaded(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    if isinstance(config, dict):
        return bool(config.get("_name_or_path"))
    return bool(getattr(config, "_name_or_path", ""))


def _outside_torch(parameter: torch.Tensor) -> bool:
    """Whether torch did not allocate the memory, and no other tensor lies in it."""
    return (
        parameter.dtype == HIGH_DTYPE
        and parameter.device.type == "cpu"
        and parameter.layout == torch.strided
        and compat.held_alone(parameter)
        and not parameter.untyped_storage().resizable()
        and not parameter.is_shared()
    )
