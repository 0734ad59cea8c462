"""Which loss scale a model's graphs run at, and who decides.

Models joined by one backward (a GAN's generator and critic) share one scale domain from
then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from autoamp import compat
from autoamp.loss_scale import LossScale, NoLossScale


class ScaleDomain:
    """The scale shared by the models that backward passes have joined."""

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale
        self._joined: ScaleDomain | None = None

    @property
    def root(self) -> ScaleDomain:
        """The domain this one has become part of, or itself."""
        domain = self
        while domain._joined is not None:
            domain = domain._joined
        return domain

    @property
    def loss_scale(self) -> LossScale:
        return self.root._loss_scale

    def join(self, other: ScaleDomain) -> None:
        """Makes one domain of two; the lower scale is known to be safe for both."""
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
        foreign: an enabled GradScaler steps this model's optimizer: it scales, we do
            not.  None before the first run.
        asked: the user has asked for a loss scale of ours.
        scalers: the GradScalers there were at its first run, and how much they had been
            used: until its first step one that has been used since may be scaling.
        automatic: nobody asked for this model by name.  It is not scaled while nobody
            is known who would skip an overflow, or while anomalies are errors.
        stepped: some optimizer with a boundary steps the model's weights.
        told: it has been said that infinite gradients were given to the script.
        skips: why each skipped step was skipped.
    """

    def __init__(
        self,
        loss_scale: LossScale,
        label: str,
        meet: Callable[[ModelScaling, Sequence[torch.Tensor]], None],
        care: Callable[[ModelScaling], None],
    ) -> None:
        """Nothing is known yet of who steps the weights.

        Args:
            meet: called with itself and the weights before the first run.
            care: called with itself before a run of a model that nobody steps.
        """
        self._meet, self._care = meet, care
        self.domain = ScaleDomain(loss_scale)
        self.label = label
        self.foreign: bool | None = None
        self.asked = False
        self.scalers: Sequence[tuple[weakref.ref[Any], int]] = ()
        self.automatic = False
        self.stepped = False
        self.told = False
        self.skips: list[str] = []

    @property
    def enabled(self) -> bool:
        """Whether graphs get a boundary at all."""
        return not isinstance(self.domain.loss_scale, NoLossScale)

    @property
    def loss_scale(self) -> LossScale:
        """The scale in force."""
        return _UNSCALED if self.foreign else self.domain.loss_scale

    def inputs(
        self, devices: Iterable[torch.device], leaves: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What a graph with a boundary is called with, for each device.

        The loss scale, its inverse, and a new flag for the overflows of this run, which
        fills the gradients of `leaves`.
        """
        if self.foreign is None:
            self.foreign = False
            self._meet(self, leaves)
        if self.scalers:
            self.decide()
        if not self.stepped:
            self._care(self)
        return self.edge(devices)

    def edge(self, devices: Iterable[torch.device]) -> list[torch.Tensor]:
        """Loss scale, inverse and flag for each device, as things are."""
        loss_scale = self.loss_scale
        if self.automatic and (not self.stepped or torch.is_anomaly_enabled()):
            loss_scale = _UNSCALED
        found: list[torch.Tensor] = []
        for device in devices:
            given = loss_scale.tensors(device)
            # What is still open may change until the backward.
            found += [t.clone() for t in given] if self.scalers else given
            found.append(torch.zeros(1, device=device))
        return found

    def decide(self) -> bool:
        """Whether a GradScaler scales, as far as is known by now."""
        scalers = [(ref(), uses) for ref, uses in self.scalers]
        if any(s is not None and compat.scaler_uses(s) > uses for s, uses in scalers):
            self.settle(foreign=True)
        return bool(self.foreign)

    def settle(self, foreign: bool) -> None:
        """Somebody steps the model's weights: a GradScaler, or nobody but we."""
        self.foreign, self.scalers = foreign, ()

    @property
    def looks(self) -> bool:
        """Whether runs are to tell how large their gradients are."""
        return self.stepped and self.loss_scale.looks

    def note_skip(self, why: str) -> None:
        """Remembers why a step was skipped, the first few hundred times."""
        if len(self.skips) < 500:  # a run that skips more often has other troubles
            self.skips.append(why)


_UNSCALED = NoLossScale()
