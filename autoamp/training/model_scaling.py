"""The loss scale a model's graphs run at: a GradScaler may scale instead.

Models joined by one backward (a GAN's generator and critic) share one scale domain from
then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoamp import compat
from autoamp.messages import advice
from autoamp.overflow.remedy import Remedy, SkipWatch
from autoamp.training.ledger.model_ledger import ModelLedger
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
        mine._loss_scale.merge(theirs._loss_scale)
        theirs._joined = mine


@dataclass(frozen=True, eq=False)
class ModelScaling:
    """The loss scaling of one conversion, as far as it is settled at the conversion.

    Attributes:
        domain: the loss scale, shared with the models that backwards have joined.
        label: the model's class name, for messages.
        low: the precision that graphs are rewritten to; None where none is captured.
        asked: whether the user has asked for a loss scale other than "auto".
        automatic: whether the model was converted without being named.  Such a model
            runs unscaled while no optimizer is known that would skip an overflow, and
            while anomaly detection makes an overflow an error.
        by_variables: whether environment variables gave the options of the conversion.
        find_models: gives the converted model and its deep copies; None for functions
            that are compiled.
        on_remedy: the listeners that are told which remedy would cure an op that has
            overflowed at step after step; empty where the user did not ask to heal.
        on_step: the listeners that are told of each step of the model's optimizers:
            whether the step is skipped, as a flag of one element where only a kernel
            knows.
        ledger: the events since the conversion.
        skip_watch: watches the runs after a skipped step.
    """

    domain: ScaleDomain
    label: str
    low: torch.dtype | None = None
    asked: bool = False
    automatic: bool = False
    by_variables: bool = False
    find_models: Callable[[ModelScaling], Sequence[torch.nn.Module]] | None = None
    on_remedy: Sequence[Callable[[ModelScaling, Remedy], None]] = ()
    on_step: Sequence[Callable[..., None]] = ()
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
        found = [p for m in modules for p in compat.parameters_here(m).values()]
        return [p for p in found if p is not None]

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
        return _UNSCALED if self.ledger.foreign else self.domain.loss_scale

    def edge_inputs(self, devices: Iterable[torch.device]) -> list[torch.Tensor]:
        """Loss scale, inverse and flag for each device, without a wait."""
        loss_scale = self.loss_scale
        if self.automatic and (not self.ledger.stepped or torch.is_anomaly_enabled()):
            loss_scale = _UNSCALED
        found: list[torch.Tensor] = []
        for device in devices:
            given = loss_scale.tensors(device)
            # While a GradScaler may be scaling, a `GraphRun` may write to these.
            found += [t.clone() for t in given] if self.ledger.scalers else given
            found.append(compat.clear_flag(device))
        return found

    @property
    def wants_size(self) -> bool:
        """Whether runs are to record how large their fp16 gradients are."""
        return self.ledger.stepped and self.loss_scale.wants_size


_UNSCALED = NoLossScale()
