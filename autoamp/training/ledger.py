"""The runs that backward passes reach, and the loss scales that these passes move.

Every run of a graph that is scaled at its edge is a `GraphRun`.  A backward that
reaches a run sets the run's scale; where the backward ends, the run's flags move the
loss scale.  What a step is decided by is no matter of runs: see `step`.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autoamp import compat
from autoamp.training.boundary import boundaries
from autoamp.training.leaves import Leaves, Origin
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.scale import DynamicLossScale, LossScale, free_to_read
from autoamp_said import logger_of

logger = logger_of(__name__)

KEPT = 64
"""The runs of past backwards that are kept, for messages and for optimizers that are
met at their first step."""

ENTRY = 2.0**11
"""The largest magnitude, scaled, of a gradient of several numbers that enters a graph.

So a loss that is a sum does not overflow at the scale that suits a mean.  On their way
gradients have a factor of 32 to grow by, and of 10**10 to shrink by."""

_LEAST, _MOST = 2.0**-100, 2.0**126
"""The range of scales by which a gradient that enters is scaled."""


class GraphRun:
    """One run of a graph, whose backward may find an overflow.

    Attributes:
        scaling: the scaling of the model.
        origin: the graph, and which of its inputs are leaves.
        leaves: the leaf inputs whose `.grad` the backward fills.
        number: the run's place in the order in which backwards reached the runs.
        backward_id: torch's id of the backward that reached the run last; -1 before.
        recorded: whether a backward over the run was itself recorded (`create_graph`):
            then a later backward may set the flags without getting to the outputs.
        entered: the largest magnitude of a gradient that entered, where it is known.
        magnitudes: the sizes of the fp16 gradients inside, at the run's scale; None
            where the loss scale does not ask for them.
    """

    __slots__ = (
        "_edge",
        "_given",
        "_scale",
        "backward_id",
        "entered",
        "leaves",
        "magnitudes",
        "number",
        "origin",
        "recorded",
        "scaling",
    )

    def __init__(
        self,
        scaling: ModelScaling,
        origin: Origin,
        leaves: Leaves,
        devices: Iterable[torch.device],
    ) -> None:
        self.scaling = scaling
        self.origin = origin
        self.leaves = leaves
        self.number = self.backward_id = -1
        self.recorded = False
        self.entered: torch.Tensor | None = None
        self.magnitudes: list[torch.Tensor] | None = None
        self._scale: LossScale = scaling.run_scale
        self._given = [self._scale.tensors(device) for device in devices]
        self._edge = [
            (scale.clone(), inverse.clone(), compat.clear_flag(scale.device))
            for scale, inverse in self._given
        ]

    @property
    def edge(self) -> list[torch.Tensor]:
        """Scale, inverse and flag for each device: the extra inputs of the graph."""
        return [each for of_device in self._edge for each in of_device]

    @property
    def found_inf(self) -> list[torch.Tensor]:
        """One flag per device, set by the graph's own backward."""
        return [flag for _, _, flag in self._edge]

    @property
    def used(self) -> torch.Tensor:
        """The scale of the last backward, 0-dim."""
        return self._edge[0][0]

    @property
    def overflowed(self) -> bool:
        """Whether a flag is set; waits for the device."""
        return any(map(bool, self.found_inf))

    @property
    def largest(self) -> torch.Tensor | None:
        """The largest fp16 gradient seen inside, at its true value."""
        if not self.magnitudes:
            return None
        inverse = self._edge[0][1]
        seen = torch.stack([m.to(inverse.device) for m in self.magnitudes])
        return seen.amax() * inverse

    def begin(
        self, grad: torch.Tensor, value: torch.Tensor | None, *, trains: bool
    ) -> None:
        """Sets scale and flags for a backward that enters the graph by `grad`.

        Args:
            value: the result that the gradient is of, where it is one number: a loss.
            trains: whether the backward fills weights.
        """
        again = self.backward_id != -1
        # A gradient to look at, of an image say, is that of autocast: no scale was ever
        # found for it.
        plain = not trains or self.scaling.ledger.a_scaler_scales()
        self.entered = None
        if again:
            for flag in self.found_inf:
                _write(flag, 0.0)
            if self.magnitudes is not None:
                self.magnitudes.clear()
        if isinstance(self._scale, DynamicLossScale) and not plain:
            self.entered = compat.largest_magnitude(grad)
            if self.entered is not None and value is not None:
                # The gradient of a loss to itself is 1, also of a loss that is NaN.
                self.entered = self.entered + 0 * value.abs().float()
        for given, (scale, inverse, _) in zip(self._given, self._edge, strict=True):
            now = self._scale.tensors(scale.device)
            if plain:
                _write(scale, 1.0)
                _write(inverse, 1.0)
            elif again or now is not given:
                _write(scale, now[0])
                _write(inverse, now[1])
            # Ranks whose graphs add up each other's gradients have one scale; and what
            # enters on another rank is not known here.
            alone = not self.leaves.groups
            if self.entered is not None and grad.numel() > 1 and alone:
                self._limit(self.entered.to(scale.device), scale, inverse)

    @staticmethod
    def _limit(
        entered: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor
    ) -> None:
        """Lowers a scale by which the gradient that enters would grow too large.

        Only to a power of two, by which no digit is lost; and no scale helps a gradient
        that is not finite.
        """
        if free_to_read(entered):
            largest = float(entered)
            if math.isfinite(largest) and largest * float(scale) > ENTRY:
                lower = 2.0 ** math.floor(math.log2(ENTRY / largest))
                _write(scale, lower)
                _write(inverse, 1 / lower)
            return
        room = (ENTRY / entered).clamp(_LEAST, _MOST).log2().floor().exp2()
        room = torch.where(entered.isfinite(), room, _MOST)
        _write(scale, room.minimum(scale))
        _write(inverse, scale.double().reciprocal())


def _write(to: torch.Tensor, value: torch.Tensor | float) -> None:
    """Writes to a tensor whose version a compiled backward may have saved."""
    if isinstance(value, torch.Tensor):
        to.data.copy_(value)
    else:
        to.data.fill_(value)


class _Backward:
    """A backward that runs.

    Attributes:
        runs: the runs that it has reached.
        trains: whether it fills weights.
        first: the scalings for which it is the first backward since a step.
    """

    def __init__(self, *, trains: bool) -> None:
        self.runs: list[GraphRun] = []
        self.trains = trains
        self.first: dict[ModelScaling, bool] = {}


class Backwards:
    """The backwards that run, by torch's ids, and the runs that were reached last."""

    def __init__(self) -> None:
        self.runs: deque[GraphRun] = deque(maxlen=KEPT)
        self._number = 0
        self._running: dict[int, _Backward] = {}
        self._lock = threading.Lock()

    def reach(
        self,
        run: GraphRun,
        inputs: _Inputs,
        value: torch.Tensor | None,
        grad: torch.Tensor,
    ) -> None:
        """Notes that the running backward has reached `run`, where `grad` enters."""
        leaves, before = inputs
        backward_id = compat.backward_id()
        with self._lock:
            running = self._running.get(backward_id)
            if running is None:
                trains = _fills_weights(leaves, before)
                running = self._running[backward_id] = _Backward(trains=trains)
                compat.at_backward_end(functools.partial(self._end, backward_id))
                # The end of a backward that has raised is never told.
                if len(self._running) > _RUNNING:
                    del self._running[min(self._running)]
            self._number += 1
            run.number = self._number
            if run.scaling not in running.first:
                ledger = run.scaling.ledger
                first = running.trains and ledger.is_first_backward(leaves)
                running.first[run.scaling] = first
            # A second derivative needs the scale of the first.
            if not run.recorded:
                run.begin(grad, value, trains=running.trains)
            run.backward_id = backward_id
            running.runs.append(run)
            self.runs.append(run)
            # Inside a backward gradients are on only where it has `create_graph=True`.
            run.recorded = run.recorded or torch.is_grad_enabled()

    @compat.never_captured
    def _end(self, backward_id: int) -> None:
        """Moves the loss scales by what a backward has found."""
        with self._lock:
            running = self._running.pop(backward_id, None)
        if running is None or not running.trains:
            return
        # Models that the user gave one scale move it once.
        of_scale: dict[int, list[ModelScaling]] = {}
        for scaling in running.first:
            of_scale.setdefault(id(scaling.loss_scale), []).append(scaling)
        for scalings in of_scale.values():
            runs = [run for run in running.runs if run.scaling in scalings]
            counts = any(running.first[scaling] for scaling in scalings)
            _move(scalings[0], runs, counts=counts)

    def settle(self, scaling: ModelScaling) -> None:
        """Moves a scale by what second derivatives have found, as a run begins.

        A backward through a recorded backward need not reach the outputs of the run.
        """
        runs = [run for run in self.runs if run.recorded and run.scaling is scaling]
        if not runs or compat.inside_backward():
            return
        flags = [flag for run in runs for flag in run.found_inf]
        device = flags[0].device
        found = torch.stack([flag.to(device) for flag in flags]).amax(0)
        if not free_to_read(found) or bool(found):
            scaling.loss_scale.update(found, counts=False)
            for flag in flags:
                flag.zero_()

    @property
    def last(self) -> int:
        """The number of the run that was reached last."""
        return self._number

    def through(self, scalings: Sequence[ModelScaling], since: int) -> list[GraphRun]:
        """All runs of the backwards that reached models of `scalings` after `since`."""
        runs = [run for run in self.runs if run.number > since]
        ids = {run.backward_id for run in runs if run.scaling in scalings}
        return [run for run in runs if run.backward_id in ids]

    def unread(self) -> list[GraphRun]:
        """The runs of the last backward, and those that no step has been told of."""
        if not self.runs:
            return []
        read = max((b.last_read for b in boundaries()), default=-1)
        last = self.runs[-1].backward_id
        return [r for r in self.runs if r.number > read or r.backward_id == last]

    def any_overflowed(self, grads: Iterable[torch.Tensor]) -> bool:
        """Whether the backwards behind `grads` overflowed by their loss scales; waits.

        A gradient that was not finite as it entered is the script's own.  Where an
        optimizer is known to hold one of `grads`, a backward counts if it went through
        weights of that optimizer, or may have; else each of the last ones counts.
        """
        ids = set(map(id, grads))
        optimized = [b.params for b in boundaries()]
        owned = [ps for ps in optimized if any(id(p.grad) in ids for p in ps)]
        held = {id(p): p for params in owned for p in params}
        runs = self.unread()
        behind = {
            r.backward_id
            for r in runs
            # Through computed inputs an overflow goes on to weights of no leaf, as to
            # those of a module that is not captured, or to FSDP's flat ones.
            if not held or r.origin.computed or r.leaves.are_among(held)
        }
        overflowed = [r for r in runs if r.backward_id in behind and r.overflowed]
        return any(r.entered is None or bool(r.entered.isfinite()) for r in overflowed)


_RUNNING = 16
"""The most backwards that run at a time: nested ones, and those of threads."""

BACKWARDS = Backwards()
"""The backwards of the whole process: one may go through several models."""


def _fills_weights(leaves: Sequence[torch.Tensor], before: Sequence[Any]) -> bool:
    """Whether the running backward computes gradients of weights, or may do so.

    Args:
        leaves: the leaves of the run that the backward has reached first.
        before: the nodes of autograd's graph that the gradient passes on to.
    """
    # The gradient of a gradient may yet reach the weights.
    if torch.is_grad_enabled():
        return True
    weights = (leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter))
    if any(map(compat.receives_gradient, weights)):
        return True
    if any(
        isinstance(leaf, torch.nn.Parameter)
        for leaf in compat.leaves_that_receive(before)
    ):
        return True
    # An image that an optimizer trains is no parameter.
    ids = {id(p) for boundary in boundaries() for p in boundary.params}
    return any(id(leaf) in ids and compat.receives_gradient(leaf) for leaf in leaves)


def _move(scaling: ModelScaling, runs: Sequence[GraphRun], *, counts: bool) -> None:
    """Moves the loss scale of a model for one backward through `runs`.

    Args:
        counts: whether the backward is the first one since a step.
    """
    scale = scaling.loss_scale
    flags = [
        (run, flag)
        for run in runs
        for flag in run.found_inf
        if not free_to_read(flag) or flag
    ]
    device = flags[0][1].device if flags else torch.device("cpu")
    found, used = compat.clear_flag(device), None
    for run, each in flags:
        flag = each.to(device)
        if run.entered is not None:
            # No scale helps a gradient that is not finite as it enters.  Like a
            # GradScaler we lower the scale all the same, once a step, but not below 1.
            cured = run.entered.to(device).isfinite()
            flag = flag * (cured | (run.used.to(device) > 1) if counts else cured)
        found = found.maximum(flag)
        # The lowest scale of a run that overflowed: the new scale must be below it, or
        # that run would overflow again.
        at = torch.where(flag != 0, run.used.to(device), torch.inf).reshape(())
        used = at if used is None else used.minimum(at)
        if run.recorded:
            each.zero_()  # or `settle` would move the scale once more
    dirty, largest = bool(flags), _largest_of(runs) if scale.wants_size else None
    groups = next((run.leaves.groups for run in runs if run.leaves.groups), ())
    if groups:
        found, dirty, largest = _agreed(groups, found, dirty, largest)
        used = runs[0].used.reshape(()) if used is None else used
    # Wherever the host may not read a flag, `found` stays a tensor, and so does all
    # that follows from it: no backward waits for the device to move a scale.
    if dirty and free_to_read(found) and not found:
        counts = False  # an overflow that lowers no scale is not clean either
    wants_size = scale.wants_size and (counts or dirty)
    scale.update(found, used, counts=counts)
    if wants_size:
        known = bool(found) if free_to_read(found) else found
        scale.note_size(largest, known)
    for run in runs:
        if run.magnitudes:
            run.magnitudes.clear()
    unknown = not (scaling.ledger.stepped or scaling.ledger.told)
    if unknown and free_to_read(found) and bool(found):
        _tell(scaling)


def _agreed(
    groups: Sequence[Any],
    found: torch.Tensor,
    dirty: bool,
    largest: torch.Tensor | None,
) -> tuple[torch.Tensor, bool, torch.Tensor | None]:
    """What the ranks of one mesh have found in a backward that they make together.

    Such a backward has collectives itself, in the same order on all ranks.
    """
    seen = torch.zeros_like(found) if largest is None else largest.to(found.device)
    told = torch.full_like(found, float(dirty)).reshape(())
    facts = torch.stack([found.reshape(()), told, seen.reshape(())]).float()
    for group in groups:
        facts = facts.to(compat.reached_on(group, facts.device))
        most = torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(facts, most, group)
    facts = facts.to(found.device)
    known = free_to_read(facts)
    return (
        facts[0].reshape(found.shape),
        bool(facts[1]) if known else dirty,
        None if largest is None else facts[2],
    )


def _largest_of(runs: Sequence[GraphRun]) -> torch.Tensor | None:
    """The largest fp16 gradient in `runs`; None where some run has seen none."""
    seen = [run.largest for run in runs]
    sizes = [each for each in seen if each is not None]
    if len(sizes) < len(seen):
        return None
    return torch.stack([each.to(sizes[0].device) for each in sizes]).amax()


def _tell(scaling: ModelScaling) -> None:
    """Says that the script has been given an overflow, which no step skips."""
    scaling.ledger.told = True
    logger.warning(
        "autoamp: gradients of %s overflowed at loss scale %g, and no torch.optim "
        "optimizer steps its weights, which would skip such a step: the script has "
        "been given infinite gradients. The scale is lowered for the next ones; give "
        "%s, or bf16, to be safe",
        scaling.label,
        scaling.loss_scale.overflowed_at,
        scaling.advice("loss_scale", 1),
    )


_Inputs = tuple[Sequence[torch.Tensor], Sequence[Any]]
"""The leaves among the inputs of a run, and the autograd nodes of computed inputs."""


def watch(
    run: GraphRun,
    results: Iterable[Any],
    leaves: Sequence[torch.Tensor],
    before: Sequence[Any],
) -> None:
    """Notes a backward as soon as it reaches one of the outputs of a run's graph.

    Args:
        results: the outputs.  Their hooks hold the rest, as their history does anyway.
        leaves: the leaf tensors of the run.
        before: the nodes of autograd's graph that made the computed inputs.
    """
    inputs = leaves, before
    for result in results:
        if isinstance(result, torch.Tensor) and result.requires_grad:
            is_loss = type(result) is torch.Tensor and result.numel() == 1
            value = result.detach() if is_loss else None
            hook = functools.partial(_reached, run, inputs, value)
            compat.hook_gradient(result, hook)


@compat.never_captured
def _reached(
    run: GraphRun,
    inputs: _Inputs,
    value: torch.Tensor | None,
    grad: torch.Tensor | None,
) -> None:
    if grad is not None and compat.backward_id() != run.backward_id:
        BACKWARDS.reach(run, inputs, value, grad)
