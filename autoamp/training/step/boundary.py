"""The boundary of an optimizer: its memory from one step to the next."""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from autoamp.training.ledger.graph_run import GraphRun, Sizes
from autoamp.training.masters import Masters
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.optimizers import params_of
from autoamp.training.scale import LossScale

logger = logging.getLogger(__name__)

Step = Callable[..., Any]

BOUNDARIES: weakref.WeakSet[OptimizerBoundary] = weakref.WeakSet()
"""The boundaries of all optimizers that have one."""


class OptimizerBoundary:
    """Stands between an optimizer and the gradients that the optimizer is given.

    Attributes:
        optimizer: the user's own; only its instance attribute `step` is ours.
        previous: the instance's own `step` before, a scheduler's wrapper say, or None.
        bound: the `step` that the boundary put on the instance; None before.
        hooks: the hooks that save and load our entries with the optimizer's state.
        off: whether the boundary was taken away, but other code has wrapped its `step`.
        scalings: the scaling of each model that the optimizer was seen to step.
        pending: saved loss scales of models that the optimizer has yet to meet.
        masters: the masters of the optimizer's half-precision parameters; None where
            `convert` was not given the optimizer with a model of such parameters.
        last_read: number of the last run whose flags were read.
        steps: how often `step` was called.
        skipped_before: whether the last step is known to have been skipped.
        unsure: the runs of the last steps whose flags only a kernel has read.
        passed: the runs of the evaluations of one step, so far without overflow.
        passed_sizes: how large gradients were in each of these evaluations.
        writes_first: whether the step may write before it evaluates its closure.
        listeners: `ModelScaling.on_step` of all models that the optimizer steps.
        wrappers: the optimizers round this one that show whether a step was skipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.previous: Step | None = optimizer.__dict__.get("step")
        self.bound: types.MethodType | None = None
        self.hooks: list[RemovableHandle] = []
        self.off = False
        self.scalings: list[ModelScaling] = []
        self.pending: list[Any] = []
        self.masters: Masters | None = None
        self.last_read = -1
        self.steps = 0
        self.skipped_before = False
        self.unsure: Sequence[GraphRun] = ()
        self.passed: list[GraphRun] = []
        self.passed_sizes: list[Sizes] = []
        self.writes_first = True
        self.listeners: Sequence[Callable[..., None]] = ()
        self.wrappers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._outer: Callable[[], torch.optim.Optimizer | None] = lambda: None

    @property
    def params(self) -> list[torch.Tensor]:
        """The tensors optimized now, by all parts of a ZeroRedundancyOptimizer."""
        return params_of(self._outer() or self.optimizer)

    def note_outer(self, outer: torch.optim.Optimizer) -> None:
        """Notes the optimizer that wraps this one."""
        if outer is not self.optimizer:
            self._outer = weakref.ref(outer)

    @property
    def weights(self) -> list[torch.Tensor]:
        """All that a step writes to besides state: parameters and their masters."""
        masters = self.masters.of.values() if self.masters is not None else ()
        return [*self.params, *masters]

    @property
    def scale_of_each(self) -> list[LossScale]:
        """The loss scale of each of the optimizer's models; several may share one."""
        return [s.domain.loss_scale for s in self.scalings if s.enabled]

    @property
    def loss_scales(self) -> list[LossScale]:
        """The loss scales of the optimizer's models, each once."""
        return list({id(s): s for s in self.scale_of_each}.values())

    def link(self, scaling: ModelScaling) -> None:
        """Notes that the optimizer steps weights of a model."""
        scaling.ledger.stepped = True
        if scaling not in self.scalings:
            if self.pending and scaling.enabled:
                self._load([scaling.domain.loss_scale], self.pending)
            self.scalings.append(scaling)
            self.listeners = (*self.listeners, *scaling.on_step)

    def tell(self, skipped: bool | torch.Tensor) -> None:
        """Counts a step for each model, and tells the listeners of it.

        Args:
            skipped: whether the step is skipped; a flag where only a kernel knows.
        """
        for scaling in self.scalings:
            scaling.ledger.steps += 1
        for listener in self.listeners:
            listener(skipped)

    def log(self, reason: str) -> None:
        """Logs what was decided about a step, for debugging."""
        name = type(self.optimizer).__name__
        logger.debug("autoamp: step %d of %s: %s", self.steps, name, reason)

    def load(self, saved: list[Any]) -> None:
        """Loads saved loss scales into the models' own, in order, as models are met.

        Raises:
            LossScaleError: a saved scale does not fit; nothing is changed.
        """
        self._load(self.scale_of_each, saved)

    def _load(self, scales: list[LossScale], saved: list[Any]) -> None:
        for scale, state in zip(scales, saved, strict=False):
            scale.check(state)
        for scale, state in zip(scales, saved, strict=False):
            scale.load_state_dict(state)
        self.pending = saved[len(scales) :]
