"""The loss scale a model's graphs run at: a GradScaler may scale instead.

Models joined by one backward (a GAN's generator and critic) share one scale domain from
then on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from autoamp import compat
from autoamp.overflow.remedy import Remedy
from autoamp.overflow.skip_watch import SkipWatch
from autoamp.saying import advice
from autoamp.training.ledger.leaves import Leaves
from autoamp.training.scale import DynamicLossScale, LossScale, NoLossScale


class ScaleDomain:
    """The scale shared by the models that backward passes have joined."""

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale
        self._joined: ScaleDomain | None = None

    @property
    def root(self) -> ScaleDomain:
        """The domain that this domain has become part of, or this domain itself."""
        domain = self
        while domain._joined is not None:
            domain = domain._joined
        return domain

    @property
    def loss_scale(self) -> LossScale:
        return self.root._loss_scale

    def join(self, other: ScaleDomain) -> None:
        """Makes one domain of two, with the lower scale: it is safe for both."""
        mine, theirs = self.root, other.root
        if mine is theirs:
            return
        if theirs._loss_scale.scale < mine._loss_scale.scale:
            mine, theirs = theirs, mine
        mine._loss_scale.heed(theirs._loss_scale)
        theirs._joined = mine


class ModelScaling:
    """The loss scaling of one conversion.

    Attributes:
        label: the model's class name, for messages.
        foreign: whether an enabled GradScaler steps this model's optimizer: then the
            GradScaler scales, and autoamp does not.  None before the first run.
        asked: whether the user has asked for a loss scale other than "auto".
        scalers: each GradScaler that existed at the model's first run, with its number
            of uses then.  Until the model's first step, a GradScaler that has been used
            since is taken to scale the loss.
        automatic: whether the model was converted without being named.  Such a model
            runs unscaled while no optimizer is known that would skip an overflow, and
            while anomaly detection makes an overflow an error.
        by_variables: whether environment variables gave the options of the conversion.
        stepped: whether an optimizer with a boundary steps the model's weights.
        told: whether a warning has told that the script was given infinite gradients.
        guards: whether a step is skipped for any gradient that is not finite, and not
            only for gradients of graphs that are scaled.
        runs_low: whether some graph of the model runs something in low precision.
        leaves: what graphs that are not scaled were given to train, at their first run.
        skips: the reason for each skipped step.
        in_a_row: how many steps have been skipped since the last step taken.
        skip_watch: watches the runs after a skipped step.
        heal: captures the model again under one more rule; None where the user has not
            asked for that.
        models: gives the converted model and its deep copies.
        describe: says what graphs the model runs.
    """

    def __init__(
        self,
        loss_scale: LossScale,
        label: str,
        meet: Callable[[ModelScaling, Sequence[torch.Tensor]], None],
        care: Callable[[ModelScaling], None],
    ) -> None:
        """Begins without a known optimizer.

        Args:
            meet: called with this object and the weights before the first run.
            care: called with this object before each run, until an optimizer with a
                boundary steps the model.
        """
        self._meet, self._care = meet, care
        self.domain = ScaleDomain(loss_scale)
        self.label = label
        self.foreign: bool | None = None
        self.asked = False
        self.scalers: Sequence[tuple[weakref.ref[Any], int]] = ()
        self.automatic = self.by_variables = False
        self.stepped = False
        self.told = False
        self.guards = self.runs_low = False
        self.leaves: list[Leaves] = []
        self.skips: list[str] = []
        self.in_a_row = 0
        self.skip_watch = SkipWatch()
        self.heal: Callable[[ModelScaling, Remedy], None] | None = None
        self.models: Callable[[], Sequence[torch.nn.Module]] = list
        self.describe: Callable[[], str] = str
        self._reducers: list[weakref.ref[Any]] = []

    def advice(self, option: str, value: object) -> str:
        """How `option` is to be written by whoever gave the conversion's options."""
        return advice(option, value, by_variables=self.by_variables)

    @functools.cached_property
    def stage_groups(self) -> list[Any]:
        """The ranks of each pipeline that the model is a stage of; looked for once."""
        return compat.stage_groups(self.models())

    @property
    def reducers(self) -> list[Any]:
        """Each DistributedDataParallel in whose forward the model has been called."""
        found = [ref() for ref in self._reducers]
        return [each for each in found if each is not None]

    @property
    def weights(self) -> list[torch.Tensor]:
        """The parameters of the converted models, as they are now."""
        modules = [each for m in self.models() for each in compat.modules_of(m)]
        found = [p for m in modules for p in compat.parameters_here(m).values()]
        return [p for p in found if p is not None]

    def note_call(self) -> None:
        """Notes who reduces the model's gradients, as a call of the model begins."""
        ddp = compat.active_ddp()
        if ddp is not None and all(ref() is not ddp for ref in self._reducers):
            self._reducers.append(weakref.ref(ddp))

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

    @property
    def learnt(self) -> int:
        """A number that grows with what is known of the weights the model trains."""
        return len(self.leaves) + self.runs_low

    @property
    def is_of_models(self) -> bool:
        """Whether the scaling is of models, not of functions that are compiled."""
        return self.models is not list

    @property
    def adapts(self) -> bool:
        """Whether a skipped step lowers the loss scale, which may be the cure."""
        return isinstance(self.domain.loss_scale, DynamicLossScale)

    @property
    def enabled(self) -> bool:
        """Whether graphs are scaled at their edge at all."""
        return not isinstance(self.domain.loss_scale, NoLossScale)

    @property
    def loss_scale(self) -> LossScale:
        """The scale in force."""
        return _UNSCALED if self.foreign else self.domain.loss_scale

    def inputs(
        self, devices: Iterable[torch.device], leaves: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The extra inputs of a graph that is scaled at its edge, for one run.

        For each device the inputs are the loss scale, its inverse, and a new flag for
        the overflows of the run.

        Args:
            leaves: the tensors whose gradients the run fills.
        """
        if self.foreign is None:
            self.foreign = False
            self._meet(self, leaves)
        if self.scalers:
            self.decide()
        if not self.stepped:
            self._care(self)
        return self.edge_inputs(devices)

    def edge_inputs(self, devices: Iterable[torch.device]) -> list[torch.Tensor]:
        """Loss scale, inverse and flag for each device, by what is known already."""
        loss_scale = self.loss_scale
        if self.automatic and (not self.stepped or torch.is_anomaly_enabled()):
            loss_scale = _UNSCALED
        found: list[torch.Tensor] = []
        for device in devices:
            given = loss_scale.tensors(device)
            # While a GradScaler may be scaling, `GraphRun.settle` may write to these.
            found += [t.clone() for t in given] if self.scalers else given
            found.append(torch.zeros(1, device=device))
        return found

    def decide(self) -> bool:
        """Whether a GradScaler scales the loss, as far as is known by now."""
        scalers = [(ref(), uses) for ref, uses in self.scalers]
        if any(s is not None and compat.scaler_uses(s) > uses for s, uses in scalers):
            self.settle(foreign=True)
        return bool(self.foreign)

    def settle(self, foreign: bool) -> None:
        """Settles whether a GradScaler (`foreign`) or autoamp scales from now on."""
        self.foreign, self.scalers = foreign, ()

    @property
    def looks(self) -> bool:
        """Whether runs are to record how large their fp16 gradients are."""
        return self.stepped and self.loss_scale.looks

    def note_skip(self, why: str) -> None:
        """Remembers why a step was skipped, the first few hundred times."""
        if len(self.skips) < 500:  # a training that skips more has other troubles
            self.skips.append(why)

    def add_to_skip(self, text: str) -> None:
        """Adds to the reason for the last skipped step."""
        if self.skips:
            self.skips[-1] += f"; {text}"


_UNSCALED = NoLossScale()
