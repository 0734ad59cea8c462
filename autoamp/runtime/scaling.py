"""Which loss scale a graph's run uses, and what its backward found.

Every run of a graph with a boundary is a `GraphRun`.  Once a backward reaches it, it is
noted here until the optimizer steps that concern it have read its flag.  Models joined
by one backward (a GAN's generator and critic) share one scale domain from then on.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from autoamp import compat
from autoamp.loss_scale import LossScale, NoLossScale
from autoamp.runtime.origin import Leaves, Origin

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
        self.asked = False
        self.scalers: Sequence[tuple[weakref.ref[Any], int]] = ()
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
        if self.scalers:
            self.decide()
        if not self.stepped:
            self._look_after_itself()
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

    def _look_after_itself(self) -> None:
        """Lowers the scale after an overflow where no optimizer's step does.

        A script may step by hand, or only look at gradients.  What it was given by the
        backward that overflowed is infinite; the next ones are not to be.
        """
        for run in BACKWARDS.overflowed(self):
            run.counted = True
            if run.backward.overflowed:
                continue  # another of its runs was there before
            run.backward.count(torch.ones(1))
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


class Backward:
    """One backward pass, which moves a loss scale once, however many runs it reaches.

    Attributes:
        counted: the flag by which it has moved; None before.  Optimizers that step
            inside the backward move it before all is known.
    """

    __slots__ = ("counted",)

    def __init__(self) -> None:
        self.counted: torch.Tensor | None = None

    def count(self, flag: torch.Tensor) -> None:
        """The loss scale has moved by `flag`."""
        known = self.counted
        self.counted = flag if known is None else flag.maximum(known.to(flag.device))

    @property
    def overflowed(self) -> bool:
        """Whether the loss scale was lowered for it; may wait for the device."""
        return self.counted is not None and bool(self.counted)


class GraphRun:
    """One run of a graph, whose backward may find an overflow.

    Attributes:
        found_inf: one flag per device, set by the graph's own backward.
        leaves: the leaf inputs whose `.grad` the backward fills.
        origin: the graph.
        task: the backward that reached it; -1 before.
        backward: the same, and how the loss scale has moved by it.
        number: its place in the order of backwards.
        gone: ids of the leaves whose gradients were thrown away after it.
        counted: the loss scale has moved by all that it found.
        clean: it is known that it found nothing.
        seen: how large the fp16 gradients inside were, at the scale of the run, which
            comes last; None where nobody looks.
        recorded: a backward over it was itself recorded (`create_graph`), and a later
            one may set its flags before it gets to the outputs.
    """

    __slots__ = (
        "_open",
        "backward",
        "clean",
        "counted",
        "found_inf",
        "gone",
        "group",
        "leaves",
        "number",
        "origin",
        "recorded",
        "scaling",
        "seen",
        "task",
    )

    def __init__(
        self,
        scaling: ModelScaling,
        origin: Origin,
        leaves: Leaves,
        edge: Sequence[torch.Tensor],
    ) -> None:
        """Args: `edge` is what `ModelScaling.inputs` gave for this run."""
        self.scaling = scaling
        self.origin = origin
        self.leaves = leaves
        self.found_inf = edge[2::3]
        self.group = compat.active_ddp_group()
        self.task = -1
        self.backward = Backward()
        self.number = -1
        self.gone: frozenset[int] = frozenset()
        self.counted = self.clean = self.recorded = False
        self._open = edge if scaling.scalers else None
        self.seen: tuple[list[torch.Tensor], torch.Tensor] | None = None

    def look(self, edge: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A list for the magnitudes of its fp16 gradients; `edge` as for the run."""
        self.seen = [], edge[1]
        return self.seen[0]

    @property
    def largest(self) -> torch.Tensor | None:
        """The largest fp16 gradient seen inside, at its true value."""
        if self.seen is None or not self.seen[0]:
            return None
        magnitudes, inverse = self.seen
        return torch.stack([m.to(inverse.device) for m in magnitudes]).amax() * inverse

    def watch(self, results: Iterable[Any], leaves: Sequence[torch.Tensor]) -> None:
        """Notes the backward as soon as it reaches one of the graph's outputs.

        The results hold `leaves`, those of this run, as their history does.
        """
        hook = functools.partial(self._reached, leaves)
        for value in results:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                compat.hook_gradient(value, hook)

    @compat.never_captured
    def _reached(self, leaves: Sequence[torch.Tensor], _: torch.Tensor) -> None:
        task = compat.backward_id()
        if task == self.task:
            return
        if self._open is not None:
            if self.scaling.decide():
                self._leave_unscaled(self._open)
            self._open = None
        BACKWARDS.note(self, task, leaves)
        self.recorded = self.recorded or torch.is_grad_enabled()

    @staticmethod
    def _leave_unscaled(edge: Sequence[torch.Tensor]) -> None:
        for scale, inverse in zip(edge[::3], edge[1::3], strict=True):
            for given in (scale, inverse):
                with compat.version_kept(given):  # a compiled backward has saved it
                    given.fill_(1.0)

    @property
    def overflowed_on_host(self) -> bool:
        """Whether it found an overflow; no, where one would have to wait to know."""
        return any(f.device.type == "cpu" and bool(f) for f in self.found_inf)

    @property
    def voided(self) -> bool:
        """Whether all gradients it filled were thrown away."""
        return bool(self.gone) and len(self.gone) == len(self.leaves.known)

    @property
    def is_orphaned(self) -> bool:
        """Whether its weights are gone, or moved: others may have their ids by now."""
        return self.leaves.stale

    @property
    def is_of_nobody(self) -> bool:
        """Whether the weights are gone, and the model with them."""
        return self.is_orphaned and self.origin.graph() is None

    def touches(self, held: Mapping[int, torch.Tensor]) -> bool:
        """Whether its backward filled the gradient of one of the tensors `held`.

        The tensors are given by their `id`, and lie where they lay in that backward.
        """
        return self.leaves.are_among(held)

    def may_touch(self, ids: Collection[int]) -> bool:
        """Whether it did so with tensors that had the same ids then."""
        return not self.leaves.known.isdisjoint(ids)

    def lives_in(self, ids: Collection[int]) -> bool:
        """Whether what it filled is still in the gradients of the tensors `ids`."""
        return not (self.leaves.known - self.gone).isdisjoint(ids)

    def throw_away(self, leaves: Iterable[torch.Tensor], in_place: bool) -> None:
        """Notes which of the gradients it filled of `leaves` are gone, or zeroed."""
        left = self.leaves.known - self.gone
        gone = [
            id(leaf)
            for leaf in leaves
            if id(leaf) in left
            and (leaf.grad is None or (in_place and _is_zero(leaf.grad)))
        ]
        self.gone |= frozenset(gone)

    def set_apart(self) -> GraphRun:
        """What it has found so far; itself it begins anew, for another backward."""
        past = copy.copy(self)
        past.found_inf = [flag.clone() for flag in self.found_inf]
        self.begin()
        return past

    def begin(self) -> None:
        """Makes it a run that has found nothing."""
        for flag in self.found_inf:
            with compat.version_kept(flag):
                flag.zero_()


class Backwards:
    """The runs that backward passes have reached, in order, until they are stepped."""

    def __init__(self) -> None:
        self.runs: list[GraphRun] = []
        self._number = 0
        self._read = -1
        self._lock = threading.Lock()

    def note(
        self, run: GraphRun, task: int, leaves: Sequence[torch.Tensor] = ()
    ) -> None:
        """Backward `task` has reached `run`, which fills the gradients of `leaves`."""
        with self._lock:
            if run.task != -1:
                self._part(run)
            self._number += 1
            run.number, run.task, run.backward = self._number, task, Backward()
            run.gone, run.counted, run.clean = frozenset(), False, False
            self._throw_away_older(run, leaves)
            for other in reversed(self.runs):
                if other.task != run.task:
                    break
                run.backward = other.backward
                run.scaling.domain.join(other.scaling.domain)
            self.runs.append(run)
            if len(self.runs) > MOST:
                self.runs = _merged(self.runs[: MOST // 2]) + self.runs[MOST // 2 :]

    def _part(self, run: GraphRun) -> None:
        """Keeps what an earlier backward over a retained graph found, by itself.

        Its gradients may be thrown away before this one fills them again.
        """
        known = next((i for i, r in enumerate(self.runs) if r is run), None)
        if run.recorded or run.clean:
            if known is not None:
                del self.runs[known]
        elif known is not None:
            self.runs[known] = run.set_apart()
        else:
            run.begin()

    def _throw_away_older(self, run: GraphRun, leaves: Sequence[torch.Tensor]) -> None:
        """Where gradients start afresh, those of earlier backwards are gone.

        Some of them, it may be: one of two optimizers zeroes its own.  Each is looked
        at where an overflow is known; where a flag is on a device, the first stands
        for all once every optimizer has read the flag.
        """
        afresh = bool(leaves) and leaves[0].grad is None
        for other in self.runs if afresh else self.runs[-KEPT:]:
            if other.clean or other.task == run.task or other.voided:
                continue
            same = other.leaves is run.leaves
            if not same and other.leaves.known.isdisjoint(run.leaves.known):
                continue
            if other.overflowed_on_host:
                other.throw_away(leaves, in_place=True)
                continue
            first = (
                leaves if same else [t for t in leaves if id(t) == other.leaves.ids[0]]
            )
            if not first or first[0].grad is not None:
                continue
            if other.number <= self._read:
                other.gone = other.leaves.known
            else:
                other.throw_away(leaves, in_place=False)

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
            runs = [r for r in self.runs if not (r.voided or r.is_orphaned)]
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

    def drop(self, held: Mapping[int, torch.Tensor]) -> None:
        """Drops runs that filled gradients of tensors `held`: nobody scales them."""
        with self._lock:
            self.runs = [r for r in self.runs if not r.touches(held)]

    def forget(self, number: int) -> None:
        """Drops runs up to `number`, which every known optimizer has read."""
        with self._lock:
            self._read = number
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
    kept: dict[tuple[Any, ...], GraphRun] = {}
    for run in runs:
        key = (id(run.origin), id(run.leaves), run.gone)
        older = kept.pop(key, None)
        if older is not None:
            for flag, earlier in zip(run.found_inf, older.found_inf, strict=True):
                flag.copy_(torch.maximum(flag, earlier))
        kept[key] = run
    return list(kept.values())


BACKWARDS = Backwards()
"""All of the process: one optimizer may hold weights of several models."""
