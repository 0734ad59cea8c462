"""Whole calls of a stand-in: in fp32, as rewritten, and under `torch.autocast`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import nn

from autoamp.ask.examine import twin_of
from autoamp.ask.outcome import Heard
from autoamp.ask.stand_in import StandIn, copied, floats_of, outcome_of, untouched
from autoamp.dtypes import needs_loss_scale
from autoamp.model.eligible import parameters_of
from autoamp.pipeline.prepared import Prepared

FP16_SCALE = 2.0**15
"""The largest loss scale while fp16 gradients are compared, so that small gradients are
not lost; gradients are divided by the scale before they are compared."""


class Trials(StandIn):
    """A stand-in whose results and gradients are heard.

    Attributes:
        scale: the loss scale of calls in low precision.
    """

    scale = 1.0

    @functools.cached_property
    def numbers(self) -> dict[Prepared, int]:
        """The number of each graph."""
        return {prepared: n for n, prepared in enumerate(self.graphs)}

    def run(self, model: nn.Module, found: Heard, scale: float) -> None:
        """Fills `found` with the output and the gradients of one call of `model`."""
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        with untouched(model, trains=self.trains):
            outcome = outcome_of(
                model,
                copied(self.call),
                self.loss_fn,
                named.values(),
                trains=self.trains,
                scale=scale,
            )
            found.returned = outcome.output
            found.output = [t.detach().clone() for t in floats_of(outcome.output)]
            found.loss = None if outcome.loss is None else float(outcome.loss.detach())
            pairs = zip(named, outcome.gradients, strict=False)
            found.gradients = {n: g.float() / scale for n, g in pairs if g is not None}

    def find_scale(self, low: Callable[[], Heard]) -> None:
        """Finds a large loss scale for fp16 at which no gradient overflows.

        Args:
            low: one call in low precision, at the scale of now.
        """
        if not needs_loss_scale(self.engine.record.low):
            return
        self.scale = FP16_SCALE
        while self.scale > 1:
            found = low()
            if all(bool(g.isfinite().all()) for g in found.gradients.values()):
                return
            self.scale /= 4

    def under_autocast(self, model: nn.Module) -> Heard | None:
        """A call under `torch.autocast`; None where it raises on this model."""
        found = Heard()
        device = next((p.device.type for p in parameters_of(model)), "cpu")
        with contextlib.suppress(RuntimeError):
            with torch.autocast(device, self.engine.record.low):
                self.run(twin_of(model), found, self.scale)
            return found
        return None
