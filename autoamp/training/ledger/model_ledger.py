"""What has happened so far in the training of one converted model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autoamp import compat
from autoamp.training.ledger.buffers import Buffers
from autoamp.training.ledger.leaves import Leaves


class ModelLedger:
    """What backwards, steps and calls have written down about one model.

    Attributes:
        foreign: whether an enabled GradScaler steps this model's optimizer: then the
            GradScaler scales, and autoamp does not.  None before the first run.
        scalers: each GradScaler that existed at the model's first run, with its number
            of uses then.  Until the model's first step, a GradScaler that has been used
            since is taken to scale the loss.
        stepped: whether an optimizer with a boundary steps the model's weights.
        told: whether a warning has told that the script was given infinite gradients.
        guards: whether a step is skipped for any gradient that is not finite, and not
            only for gradients of graphs that are scaled.
        called: whether a call with gradients went through the model's conversion, was
            told of, or was to run in fp32; until then steps are looked at.
        runs_low: whether some graph of the model runs something in low precision.
        captured: each captured graph's low float ops, all its float ops, and the
            compute dtype.
        leaves: the trained tensors of graphs that are not scaled, at their first run.
        skips: the reason for each skipped step.
        steps: how many steps optimizers have taken or skipped; a snapshot counts
            the same steps.
        in_a_row: how many steps have been skipped since the last step taken.
        buffers: the buffers that runs have written to since the last step.
    """

    def __init__(self) -> None:
        self.foreign: bool | None = None
        self.scalers: Sequence[tuple[weakref.ref[Any], int]] = ()
        self.stepped = self.told = self.guards = self.runs_low = self.called = False
        self.captured: list[tuple[int, int, str]] = []
        self.leaves: list[Leaves] = []
        self.skips: list[str] = []
        self.steps = self.in_a_row = 0
        self.buffers = Buffers()
        self._reducers: list[weakref.ref[Any]] = []

    @property
    def reducers(self) -> list[Any]:
        """Each DistributedDataParallel in whose forward the model has been called."""
        found = [ref() for ref in self._reducers]
        return [each for each in found if each is not None]

    @property
    def learnt(self) -> int:
        """A number that grows with each weight that the model is known to train."""
        return len(self.leaves) + self.runs_low

    def keep(self, written: Sequence[torch.Tensor]) -> None:
        """Copies buffers that a run is about to write to, for the case of a skip."""
        if not self.stepped:  # nobody may ever step: only the last run is undone
            self.buffers.forget()
        self.buffers.keep(written)

    def note_call(self) -> None:
        """Notes by which code gradients are reduced, as a call of the model begins."""
        ddp = compat.active_ddp()
        if ddp is not None and all(ref() is not ddp for ref in self._reducers):
            self._reducers.append(weakref.ref(ddp))

    @property
    def graphs(self) -> str:
        """How many graphs there are, and how many of their ops are low; "" if none."""
        if not self.captured:
            return ""
        low, every, dtypes = zip(*self.captured, strict=True)
        count = len(self.captured)
        ops = f"{sum(low)} of {sum(every)} ops in {dtypes[0]}"
        return f"{count} graph{'s' * (count != 1)}, {ops}"

    def note_called(self) -> None:
        """Notes that a call came through the conversion, or that it was told of."""
        self.called = True

    def note_graph(self, low: int, every: int, dtype: str) -> None:
        """Notes a captured graph: how many of its float ops are low."""
        self.captured.append((low, every, dtype))

    def note_low(self) -> None:
        """Notes that a graph of the model runs something in low precision."""
        self.runs_low = True

    def note_leaves(self, args: Sequence[Any]) -> None:
        """Notes the arguments of a graph whose `.grad` a backward fills."""
        # The memory of other tensors, DTensors say, may not be known.
        plain = (torch.Tensor, torch.nn.Parameter)
        given = [a for a in args if type(a) in plain]
        found = [t for t in given if t.requires_grad and t.is_leaf]
        if found:
            self.leaves.append(Leaves(found, list(map(id, found))))

    def note_scalers(self, scalers: Iterable[Any]) -> None:
        """Notes the GradScalers of the script: one of them may scale the loss."""
        self.scalers = [(weakref.ref(s), compat.scaler_uses(s)) for s in scalers]

    def a_scaler_scales(self) -> bool:
        """Whether a GradScaler scales the loss, as far as is known by now."""
        scalers = [(ref(), uses) for ref, uses in self.scalers]
        if any(s is not None and compat.scaler_uses(s) > uses for s, uses in scalers):
            self.set_foreign(True)
        return bool(self.foreign)

    def set_foreign(self, foreign: bool) -> None:
        """Sets whether a GradScaler (`foreign`) or autoamp scales from now on."""
        self.foreign, self.scalers = foreign, ()

    def note_skip(self, why: str) -> None:
        """Remembers why a step was skipped, the first few hundred times."""
        if len(self.skips) < 500:  # a training that skips more has other troubles
            self.skips.append(why)

    def add_to_skip(self, text: str) -> None:
        """Adds to the reason for the last skipped step."""
        if self.skips:
            self.skips[-1] += f"; {text}"
