"""The loss scaling of one conversion, and the events of its training so far.

A model's graphs are scaled by the loss scale of the model, unless a GradScaler scales
instead.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoamp import compat
from autoamp.messages import advice
from autoamp.training.blame.remedy import SkipWatch
from autoamp.training.buffers import Buffers
from autoamp.training.leaves import Leaves
from autoamp.training.scale import DynamicLossScale, LossScale, NoLossScale


class ModelLedger:
    """The events of one model's training: its graphs, steps, skips and GradScalers.

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
        steps: how many steps optimizers have taken or skipped.
        counted: the number of steps when a backward last counted towards growth.
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
        self.counted = -1
        self.buffers = Buffers()
        self._reducers: list[weakref.ref[Any]] = []

    @property
    def reducers(self) -> list[Any]:
        """Each DistributedDataParallel in whose forward the model has been called."""
        reducers = [ref() for ref in self._reducers]
        return [each for each in reducers if each is not None]

    @property
    def learnt(self) -> int:
        """A number that grows with each weight that the model is known to train."""
        return len(self.leaves) + self.runs_low

    @property
    def graphs(self) -> str:
        """How many graphs there are, and how many of their ops are low; "" if none."""
        if not self.captured:
            return ""
        low, every, dtypes = zip(*self.captured, strict=True)
        count = len(self.captured)
        ops = f"{sum(low)} of {sum(every)} ops in {dtypes[0]}"
        return f"{count} graph{'s' * (count != 1)}, {ops}"

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
        tensors = [a for a in args if type(a) in plain]
        leaves = [t for t in tensors if t.requires_grad and t.is_leaf]
        if leaves:
            self.leaves.append(Leaves(leaves))

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

    def is_first_backward(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether a backward that begins is the first since a step or a `zero_grad`.

        Args:
            leaves: the leaves whose gradients the backward fills.
        """
        stepped, self.counted = self.counted != self.steps, self.steps
        return stepped or not leaves or leaves[0].grad is None

    def note_skip(self, why: str) -> None:
        """Remembers why a step was skipped, the first few hundred times."""
        if len(self.skips) < 500:  # a training that skips more has other troubles
            self.skips.append(why)

    def add_to_skip(self, text: str) -> None:
        """Adds to the reason for the last skipped step."""
        if self.skips:
            self.skips[-1] += f"; {text}"


@dataclass(frozen=True, eq=False)
class ModelScaling:
    """The loss scaling of one conversion, as far as it is settled at the conversion.

    Attributes:
        own_scale: the model's loss scale.
        label: the model's class name, for messages.
        low: the precision that graphs are rewritten to; None where none is captured.
        asked: whether the user has asked for a loss scale other than "auto".
        automatic: whether the model was converted without being named.  Such a model
            runs unscaled while no optimizer is known that would skip an overflow, and
            while anomaly detection makes an overflow an error.
        by_variables: whether environment variables gave the options of the conversion.
        find_models: gives the converted model and its deep copies; None for functions
            that are compiled.
        unscaled: the scale of runs that the model's own is not in force for.
        ledger: the events since the conversion.
        skip_watch: watches the runs after a skipped step.
    """

    own_scale: LossScale
    label: str
    low: torch.dtype | None = None
    asked: bool = False
    automatic: bool = False
    by_variables: bool = False
    find_models: Callable[[ModelScaling], Sequence[torch.nn.Module]] | None = None
    unscaled: LossScale = field(default_factory=NoLossScale)
    ledger: ModelLedger = field(default_factory=ModelLedger)
    skip_watch: SkipWatch = field(default_factory=SkipWatch)

    def advice(self, option: str, value: object) -> str:
        """How the user writes `option`: in Python, or as an environment variable."""
        return advice(option, value, by_variables=self.by_variables)

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """The converted model and its deep copies."""
        return () if self.find_models is None else self.find_models(self)

    @functools.cached_property
    def stage_groups(self) -> list[Any]:
        """The ranks of each pipeline that the model is a stage of; looked for once."""
        return compat.stage_groups(self.models)

    @property
    def weights(self) -> list[torch.Tensor]:
        """The parameters of the converted models, as they are now."""
        modules = [each for m in self.models for each in compat.modules_of(m)]
        weights = [p for m in modules for p in compat.parameters_here(m).values()]
        return [p for p in weights if p is not None]

    @property
    def adapts(self) -> bool:
        """Whether a skipped step lowers the loss scale, which may be the cure."""
        return isinstance(self.own_scale, DynamicLossScale)

    @property
    def enabled(self) -> bool:
        """Whether graphs are scaled at their edge at all."""
        return not isinstance(self.own_scale, NoLossScale)

    @property
    def loss_scale(self) -> LossScale:
        """The scale in force."""
        return self.unscaled if self.ledger.foreign else self.own_scale

    @property
    def wants_size(self) -> bool:
        """Whether runs are to record how large their fp16 gradients are."""
        return self.ledger.stepped and self.loss_scale.wants_size

    @property
    def run_scale(self) -> LossScale:
        """The scale for the runs of graphs that begin now."""
        # Anomaly detection raises at the first NaN of a backward, also where a skipped
        # step would mend it; a script that was never changed must not fail.
        if self.automatic and (not self.ledger.stepped or torch.is_anomaly_enabled()):
            return self.unscaled
        return self.loss_scale
