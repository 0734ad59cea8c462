"""Copies of the buffers that forwards write to, for a step that is skipped.

A step that is skipped leaves all state as it was: running statistics, counters,
codebooks and averages, too, which a forward has written to before anybody knew that
its numbers overflow.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from autoamp import compat

HOLDING: weakref.WeakSet[Buffers] = weakref.WeakSet()
"""The models for which something is kept."""


@dataclass(slots=True)
class _Kept:
    """A buffer, its copy, and its version before and after the runs of graphs."""

    buffer: torch.Tensor
    copy: torch.Tensor
    before: int
    after: int


class Written(NamedTuple):
    """The buffers that a graph writes to.

    Attributes:
        positions: the buffers among the inputs of the graph.
        holders: for a buffer whose module holds others that are no inputs: its
            position, its name and the module.  Code between graphs may write to those
            (a batch norm with `momentum=None`).
    """

    positions: Sequence[int]
    holders: Sequence[tuple[int, str, weakref.ref[nn.Module]]]

    @classmethod
    def of(
        cls,
        models: Iterable[nn.Module],
        inputs: Sequence[Any],
        positions: Iterable[int],
    ) -> Written:
        """The buffers of `models` among the `inputs` at `positions`."""
        written = {id(inputs[at]): at for at in positions}
        if not written:
            return cls([], [])
        given, found, holders = set(map(id, inputs)), [], []
        for module in (each for model in models for each in compat.modules_of(model)):
            buffers = compat.buffers_here(module)
            own = [(written[id(b)], n) for n, b in buffers.items() if id(b) in written]
            found += [at for at, _ in own]
            others = {id(b) for b in buffers.values() if b is not None}
            if own and not others <= given:
                holders.append((*own[0], weakref.ref(module)))
        return cls([*dict.fromkeys(found)], holders)

    def buffers(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The buffers that a run with `args` may write to."""
        found = [args[at] for at in self.positions]
        for at, name, holder in self.holders:
            module = holder()
            held = {} if module is None else compat.buffers_here(module)
            if held.get(name) is args[at]:  # and not the buffer of a copy of the model
                others = [b for b in held.values() if b is not None]
                found += [b for b in others if b is not args[at]]
        return found


class Buffers:
    """Copies of the buffers that graphs, and other calls, wrote to since the last step.

    Attributes:
        whole: whether a call is running for which all buffers of its model were kept;
            then a graph in it keeps none.
    """

    def __init__(self) -> None:
        self.whole = False
        self._kept: dict[int, _Kept] = {}
        self._spare: dict[int, _Kept] = {}  # memory of the copies of the step before

    def keep(self, written: Iterable[torch.Tensor]) -> None:
        """Copies what a run is about to write to, unless a run since the step has.

        A buffer that other code has written to meanwhile (`load_state_dict`) is copied
        anew: that write is not undone.  DistributedDataParallel writes to buffers
        before each forward; there the first copy stays.
        """
        if self.whole:
            return
        fresh, others = [], not compat.writes_buffers(compat.active_ddp())
        for buffer in written:
            known, version = self._kept.get(id(buffer)), compat.version(buffer)
            # Code outside of graphs has written to the buffer since: its write stays.
            if known is None or (others and known.after != version):
                fresh.append(buffer)
        if not fresh or any(map(compat.is_batch, fresh)):
            return
        HOLDING.add(self)
        with torch.no_grad():
            copies = [*map(self._memory_for, fresh)]
            compat.copy_all(copies, fresh)
        for buffer, copy in zip(fresh, copies, strict=True):
            version = compat.version(buffer)
            self._kept[id(buffer)] = _Kept(buffer, copy, version, version)

    def _memory_for(self, buffer: torch.Tensor) -> torch.Tensor:
        spare = self._spare.pop(id(buffer), None)
        if spare is not None and spare.buffer is buffer:
            copy = spare.copy
            like = copy.dtype == buffer.dtype and copy.device == buffer.device
            if like and copy.shape == buffer.shape:
                return copy
        return torch.empty_like(buffer)

    def note(self, written: Iterable[torch.Tensor]) -> None:
        """Notes that a run has written to what was kept."""
        for buffer in written:
            known = self._kept.get(id(buffer))
            if known is not None:
                known.after = compat.version(buffer)

    def put_back(self, flag: torch.Tensor | None = None) -> None:
        """Undoes the writes of runs; with a `flag`, where it is set, without a wait."""
        every = [*self._kept.values()]
        self.forget()
        if not every:
            return
        buffers, copies = [k.buffer for k in every], [k.copy for k in every]
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for kept in every:
                if kept.before == compat.version(kept.buffer):
                    # A batch norm writes running statistics without a move of the
                    # version counter.  If this write moved it, the backward of a graph
                    # that saved them would raise "modified by an inplace operation".
                    stack.enter_context(compat.version_kept(kept.buffer))
            if flag is not None:
                devices = {buffer.device for buffer in buffers}
                # The flag is on the optimizer's device; a buffer may be on another.
                found = {d: flag.to(d).reshape(()) != 0 for d in devices}
                copies = [
                    torch.where(found[buffer.device], copy, buffer)
                    for buffer, copy in zip(buffers, copies, strict=True)
                ]
            compat.copy_all(buffers, copies)

    def forget(self) -> None:
        """Lets the writes be: a step was taken."""
        if self.whole:
            return
        self._kept, self._spare = {}, self._kept or self._spare
        HOLDING.discard(self)
