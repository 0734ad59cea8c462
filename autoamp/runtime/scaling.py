"""Which loss scale a graph's run uses, and what its backward found.

Every run of a graph with a boundary is a `GraphRun`.  Once a backward reaches it, it is
noted here until the optimizer steps that concern it have read its flag.  Models joined
by one backward (a GAN's generator and critic) share one scale domain from then on.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.loss_scale import LossScale, NoLossScale

logger = logging.getLogger(__name__)

KEPT = 64
"""Runs kept after every known optimizer has read them: one we meet later, at its first
step, may hold weights that the same backward reached."""

MOST = 1024
"""Runs kept for an optimizer that does not step; older ones are merged."""


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
        theirs._joined = mine


class ModelScaling:
    """The loss scaling of one conversion.

    Attributes:
        label: the model's class name, for messages.
        foreign: an enabled GradScaler steps this model's optimizer: it scales, we do
            not.  None before the first run.
        automatic: nobody asked for this model by name.  It is not scaled while nobody
            is known who would skip an overflow, or while anomalies are errors.
        stepped: some optimizer with a boundary steps the model's weights.
        skips: why each skipped step was skipped.
    """

    def __init__(
        self,
        loss_scale: LossScale,
        label: str,
        meet: Callable[[ModelScaling, Sequence[torch.Tensor]], None],
    ) -> None:
        """Args: `meet(self, weights)` is called before the first run."""
        self._meet = meet
        self.domain = ScaleDomain(loss_scale)
        self.label = label
        self.foreign: bool | None = None
        self.automatic = False
        self.stepped = False
        self._told = False
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
        if not self.stepped:
            self._look_after_itself()
        loss_scale = self.loss_scale
        if self.automatic and (not self.stepped or torch.is_anomaly_enabled()):
            loss_scale = _UNSCALED
        found: list[torch.Tensor] = []
        for device in devices:
            found += loss_scale.tensors(device)
            found.append(torch.zeros(1, device=device))
        return found

    def _look_after_itself(self) -> None:
        """Lowers the scale after an overflow where no optimizer's step does.

        A script may step by hand, or only look at gradients.  What it was given by the
        backward that overflowed is infinite; the next ones are not to be.
        """
        for run in BACKWARDS.overflowed(self):
            run.counted = True
            self.loss_scale.update(torch.ones(1))
            if not self._told:
                self._told = True
                logger.warning(
                    "autoamp: gradients of %s overflowed at loss scale %g, and no "
                    "torch.optim optimizer steps its weights, which would skip such a "
                    "step: the script has been given infinite gradients. The scale is "
                    "lowered for the next ones; give loss_scale=1, or bf16, to be safe",
                    self.label,
                    self.loss_scale.scale,
                )

    def note_skip(self, why: str) -> None:
        """Remembers why a step was skipped, the first few hundred times."""
        if len(self.skips) < 500:  # a run that skips more often has other troubles
            self.skips.append(why)


_UNSCALED = NoLossScale()


@dataclass(frozen=True)
class Origin:
    """The graph a run is of.

    Attributes:
        gm: the graph, while it lives.
        places: where among its inputs the leaves are.
        passes_on: gradients leave it through inputs that others computed.
    """

    gm: weakref.ref[fx.GraphModule]
    places: Sequence[int]
    passes_on: bool


class GraphRun:
    """One run of a graph, whose backward may find an overflow.

    Attributes:
        found_inf: one flag per device, set by the graph's own backward.
        leaves: ids of the leaf inputs whose `.grad` the backward fills, in order.
        memory: of the first of them.
        origin: the graph.
        task: the backward that reached it; -1 before.
        number: its place in the order of backwards.
        voided: gradients were started afresh after it: its own are gone, unless some
            weights were left out of the new ones.
        counted: the loss scale has moved by it.
    """

    __slots__ = (
        "counted",
        "found_inf",
        "group",
        "leaves",
        "memory",
        "number",
        "origin",
        "scaling",
        "task",
        "voided",
    )

    def __init__(
        self,
        scaling: ModelScaling,
        origin: Origin,
        leaves: Sequence[torch.Tensor],
        edge: Sequence[torch.Tensor],
    ) -> None:
        """Args: `edge` is what `ModelScaling.inputs` gave for this run."""
        self.scaling = scaling
        self.origin = origin
        # Not the weights themselves: a run outlives its model here.
        self.leaves = [id(leaf) for leaf in leaves]
        self.memory = compat.memory_of(leaves[0]) if leaves else None
        self.found_inf = edge[2::3]
        self.group = compat.active_ddp_group()
        self.task = -1
        self.number = -1
        self.voided = False
        self.counted = False

    def watch(self, results: Iterable[Any], leaves: Sequence[torch.Tensor]) -> None:
        """Notes the backward as soon as it reaches one of the graph's outputs.

        The results hold `leaves`, those of this run, as their history does.
        """
        hook = functools.partial(self._reached, *leaves[:1])
        for value in results:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(hook)

    def _reached(self, *first_and_grad: torch.Tensor) -> None:
        task = compat.backward_id()
        if task != self.task:
            self.task = task
            BACKWARDS.note(self, *first_and_grad[:-1])

    @property
    def is_orphaned(self) -> bool:
        """Whether the memory of its leaves is gone: others may have their ids by now.

        Or the same tensors, where they were given other memory meanwhile.
        """
        return self.memory is not None and self.memory() is None

    @property
    def overflowed_on_host(self) -> bool:
        """Whether it found an overflow; no, where one would have to wait to know."""
        return any(f.device.type == "cpu" and bool(f) for f in self.found_inf)

    def touches(self, ids: set[int]) -> bool:
        """Whether its backward fills the gradient of one of the tensors `ids`.

        Not once it is orphaned.
        """
        return not self.is_orphaned and self.may_touch(ids)

    def may_touch(self, ids: set[int]) -> bool:
        """Whether it did so with tensors that had the same ids then."""
        return any(leaf in ids for leaf in self.leaves)


class Backwards:
    """The runs that backward passes have reached, in order, until they are stepped."""

    def __init__(self) -> None:
        self.runs: list[GraphRun] = []
        self._number = 0
        self._lock = threading.Lock()

    def note(self, run: GraphRun, first: torch.Tensor | None = None) -> None:
        """A backward has reached `run`, whose first leaf is `first`."""
        with self._lock:
            self._number += 1
            run.number = self._number
            run.voided = run.counted = False
            if run in self.runs[-KEPT:]:  # a second backward over a retained graph
                self.runs.remove(run)
            if first is not None:
                self._void_older(run, first.grad)
            for other in reversed(self.runs):
                if other.task != run.task:
                    break
                run.scaling.domain.join(other.scaling.domain)
            self.runs.append(run)
            if len(self.runs) > MOST:
                self.runs = _merged(self.runs[: MOST // 2]) + self.runs[MOST // 2 :]

    def _void_older(self, run: GraphRun, accumulated: torch.Tensor | None) -> None:
        """Where gradients start afresh, those of earlier backwards are gone."""
        older = [
            other
            for other in (self.runs if accumulated is None else self.runs[-KEPT:])
            if other.task != run.task and other.leaves[:1] == run.leaves[:1]
        ]
        if accumulated is not None:
            # Or they were zeroed in place: looked at where that waits for nothing.
            older = [r for r in older if r.overflowed_on_host and not r.voided]
            if not older or not _is_zero(accumulated):
                return
        for other in older:
            other.voided = True

    def overflowed(self, scaling: ModelScaling) -> list[GraphRun]:
        """Runs of a model whose overflow nobody has counted, as far as that is free."""
        with self._lock:
            late = self.runs[-KEPT:]
        mine = [r for r in late if r.scaling is scaling and not r.counted]
        return [run for run in mine if run.overflowed_on_host]

    def any_overflowed(self) -> bool:
        """Whether gradients that are there now hold an overflow; waits for the device.

        Until the next backward those of a step that was just skipped still do.
        """
        with self._lock:
            runs = [r for r in self.runs if not r.voided]
        return any(bool(flag) for run in runs for flag in run.found_inf)

    def since(self, number: int) -> list[GraphRun]:
        """The runs reached after `number`."""
        with self._lock:
            found = []
            for run in reversed(self.runs):
                if run.number <= number:
                    break
                found.append(run)
            return found[::-1]

    def drop(self, ids: set[int]) -> None:
        """Drops runs that filled gradients of the tensors `ids`: nobody scales them."""
        with self._lock:
            self.runs = [r for r in self.runs if not r.touches(ids)]

    def forget(self, number: int) -> None:
        """Drops runs up to `number`, which every known optimizer has read."""
        with self._lock:
            old, kept = self.runs[:-KEPT], self.runs[-KEPT:]
            self.runs = [r for r in old if r.number > number] + kept


def _is_zero(grad: torch.Tensor) -> bool:
    return (
        grad.device.type == "cpu"
        and grad.layout == torch.strided
        and not bool(grad.any())
    )


def _merged(runs: list[GraphRun]) -> list[GraphRun]:
    """One run for all of the same weights, with the flags of all."""
    kept: dict[tuple[int, ...], GraphRun] = {}
    for run in runs:
        key = (id(run.origin), *run.leaves[:1])
        older = kept.pop(key, None)
        if older is not None:
            for flag, earlier in zip(run.found_inf, older.found_inf, strict=True):
                flag.copy_(torch.maximum(flag, earlier))
        kept[key] = run
    return list(kept.values())


BACKWARDS = Backwards()
"""All of the process: one optimizer may hold weights of several models."""
