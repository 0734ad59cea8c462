"""The runs that backward passes have reached, until optimizers have read their flags.

Every run of a graph that is scaled at its edge is a `GraphRun`.  `watch` notes a run
here once a backward reaches the run; optimizer steps then read the run's flags.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from autoamp import compat
from autoamp.training.leaves import Leaves, Origin
from autoamp.training.scaling import ModelScaling

logger = logging.getLogger(__name__)

KEPT = 64
"""Runs kept after every known optimizer has read them: an optimizer that is met later,
at its first step, may hold weights that the same backward reached."""

MOST = 1024
"""Runs kept for an optimizer that does not step; older runs are merged."""

Sizes = dict[int, torch.Tensor | None]
"""The largest fp16 gradient of a step by the `id` of the loss scale; None where it is
not known.  A loss scale that no run of the step used has no entry."""


class BackwardPass:
    """One backward pass, which moves a loss scale once, however many runs it reaches.

    Attributes:
        moved_by: the flag by which the loss scale has moved; None before.  Optimizers
            that step inside the backward move the scale before all flags are known.
    """

    __slots__ = ("moved_by",)

    def __init__(self) -> None:
        self.moved_by: torch.Tensor | None = None

    def note_move(self, flag: torch.Tensor) -> None:
        """Notes that the loss scale has moved by `flag`."""
        known = self.moved_by
        self.moved_by = flag if known is None else flag.maximum(known.to(flag.device))

    @property
    def overflowed(self) -> bool:
        """Whether the loss scale was lowered for the backward; may wait for a GPU."""
        return self.moved_by is not None and bool(self.moved_by)


class GraphRun:
    """One run of a graph, whose backward may find an overflow.

    Attributes:
        found_inf: one flag per device, set by the graph's own backward.
        leaves: the leaf inputs whose `.grad` the backward fills.
        origin: the graph, and which of its inputs are leaves.
        backward_id: torch's id of the backward that reached the run; -1 before.
        backward_pass: the same backward, with the flag by which the scale has moved.
        number: the run's place in the order in which backwards reached the runs.
        gone: ids of the leaves whose gradients were thrown away after the backward.
        scale_moved: whether the loss scale has moved by all that the run found.
        clean: whether the run is known to have found nothing.
        magnitudes: the sizes of the fp16 gradients inside, at the run's loss scale, and
            the inverse of that scale; None where the loss scale does not ask for them.
        reduced: whether DistributedDataParallel reduces the run's gradients.
        recorded: whether a backward over the run was itself recorded (`create_graph`):
            then a later backward may set the flags before it gets to the outputs.
    """

    __slots__ = (
        "_open",
        "backward_id",
        "backward_pass",
        "clean",
        "found_inf",
        "gone",
        "leaves",
        "magnitudes",
        "number",
        "origin",
        "recorded",
        "reduced",
        "scale_moved",
        "scaling",
    )

    def __init__(
        self,
        scaling: ModelScaling,
        origin: Origin,
        leaves: Leaves,
        edge: Sequence[torch.Tensor],
    ) -> None:
        """Args: `edge` holds the inputs that `inputs_of_run` gave for the run."""
        self.scaling = scaling
        self.origin = origin
        self.leaves = leaves
        # `edge` holds scale, inverse and flag for each device.
        self.found_inf = edge[2::3]
        self.reduced = compat.active_ddp() is not None
        self.backward_id = -1
        self.backward_pass = BackwardPass()
        self.number = -1
        self.gone: frozenset[int] = frozenset()
        self.scale_moved = self.clean = self.recorded = False
        self._open = edge if scaling.ledger.scalers else None
        self.magnitudes: tuple[list[torch.Tensor], torch.Tensor] | None = None

    def begin_sizes(self, edge: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A list for the magnitudes of the fp16 gradients; `edge` as in `__init__`."""
        self.magnitudes = [], edge[1]
        return self.magnitudes[0]

    @property
    def largest(self) -> torch.Tensor | None:
        """The largest fp16 gradient seen inside, at its true value."""
        if self.magnitudes is None or not self.magnitudes[0]:
            return None
        magnitudes, inverse = self.magnitudes
        return torch.stack([m.to(inverse.device) for m in magnitudes]).amax() * inverse

    def unscale_if_foreign(self) -> None:
        """Sets the run's scale to 1 where a GradScaler turns out to scale the loss."""
        if self._open is not None and self.scaling.ledger.a_scaler_scales():
            for scale, inverse in zip(self._open[::3], self._open[1::3], strict=True):
                for given in (scale, inverse):
                    with compat.version_kept(given):  # saved by a compiled backward
                        given.fill_(1.0)
        self._open = None

    @property
    def overflowed(self) -> bool:
        """Whether a flag is set; waits for the device."""
        return any(map(bool, self.found_inf))

    @property
    def overflowed_on_host(self) -> bool:
        """Whether a flag in host memory is set; flags on other devices are not read."""
        return any(f.device.type == "cpu" and bool(f) for f in self.found_inf)

    @property
    def voided(self) -> bool:
        """Whether all gradients that the run filled were thrown away."""
        return bool(self.gone) and len(self.gone) == len(self.leaves.known)

    @property
    def is_orphaned(self) -> bool:
        """Whether the weights are gone, or moved: other tensors may have their ids."""
        return self.leaves.stale

    def may_touch(self, ids: Collection[int]) -> bool:
        """Whether the run filled gradients of tensors that had some of `ids` then."""
        return not self.leaves.known.isdisjoint(ids)

    def lives_in(self, ids: Collection[int]) -> bool:
        """Whether a gradient that the run filled is still in a tensor of `ids`."""
        return not (self.leaves.known - self.gone).isdisjoint(ids)

    def throw_away(self, leaves: Iterable[torch.Tensor], in_place: bool) -> None:
        """Notes which gradients of `leaves` that the run filled are gone.

        Args:
            in_place: whether a gradient that is zero counts as gone too.
        """
        left = self.leaves.known - self.gone
        mine = [leaf for leaf in leaves if id(leaf) in left]
        self.gone |= {
            id(leaf)
            for leaf in mine
            if leaf.grad is None or (in_place and _is_zero(leaf.grad))
        }

    def set_apart(self) -> GraphRun:
        """A copy with the flags so far; the run itself begins anew, for a backward."""
        past = copy.copy(self)
        past.found_inf = [flag.clone() for flag in self.found_inf]
        self.begin()
        return past

    def begin(self) -> None:
        """Clears the flags: the run has found nothing."""
        for flag in self.found_inf:
            with compat.version_kept(flag):
                flag.zero_()


def _is_zero(grad: torch.Tensor) -> bool:
    # A look at a gradient on a GPU would wait.
    plain = grad.device.type == "cpu" and grad.layout == torch.strided
    return plain and not bool(grad.any())


def sizes_of(runs: Sequence[GraphRun]) -> Sizes:
    """How large gradients were, for each loss scale that is to move for `runs`.

    A size is not known where some run of the same backwards has seen none (yet).
    """
    found: dict[int, list[torch.Tensor | None]] = {}
    for run in runs:
        if not run.scale_moved:
            found.setdefault(id(run.scaling.loss_scale), []).append(run.largest)
    return {scale: _largest(sizes) for scale, sizes in found.items()}


def _largest(sizes: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    seen = [each for each in sizes if each is not None]
    if compat.inside_backward() or len(seen) < len(sizes):
        return None
    return torch.stack([each.to(seen[0].device) for each in seen]).amax()


class Backwards:
    """The runs that backward passes have reached, in order, until they are stepped."""

    def __init__(self) -> None:
        self.runs: list[GraphRun] = []
        self._number = 0
        self._read = -1
        self._lock = threading.Lock()

    def note(
        self, run: GraphRun, backward_id: int, leaves: Sequence[torch.Tensor] = ()
    ) -> None:
        """Notes that backward `backward_id` has reached `run`, and fills `leaves`."""
        with self._lock:
            if run.backward_id != -1:
                self._part(run)
            self._number += 1
            run.number, run.backward_id = self._number, backward_id
            run.backward_pass = BackwardPass()
            run.gone, run.scale_moved, run.clean = frozenset(), False, False
            self._throw_away_older(run, leaves)
            for other in reversed(self.runs):
                if other.backward_id != run.backward_id:
                    break
                run.backward_pass = other.backward_pass
                run.scaling.domain.join(other.scaling.domain)
            self.runs.append(run)
            if len(self.runs) > MOST:
                self.runs = _merged(self.runs[: MOST // 2]) + self.runs[MOST // 2 :]

    def _part(self, run: GraphRun) -> None:
        """Keeps the findings of an earlier backward over the same graph apart.

        The gradients of the earlier backward may be thrown away before the new backward
        fills them again.
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
        """Notes which gradients of earlier backwards are gone as `run` begins."""
        afresh = bool(leaves) and leaves[0].grad is None
        for other in self.runs if afresh else self.runs[-KEPT:]:
            if other.clean or other.backward_id == run.backward_id or other.voided:
                continue
            same = other.leaves is run.leaves
            if not same and not other.may_touch(run.leaves.known):
                continue
            if other.overflowed_on_host:
                # One of two optimizers may have zeroed its own gradients alone.
                other.throw_away(leaves, in_place=True)
                continue
            first = (
                leaves if same else [t for t in leaves if id(t) == other.leaves.ids[0]]
            )
            if not first or first[0].grad is not None:
                continue
            # Of a flag on a device nobody knows whether it is set: once every optimizer
            # has read it, the first gradient stands for all.
            if other.number <= self._read:
                other.gone = other.leaves.known
            else:
                other.throw_away(leaves, in_place=False)

    def overflowed(self, scaling: ModelScaling) -> list[GraphRun]:
        """Runs of a model with an overflow by which no scale has moved yet.

        Only flags in host memory are read, because reading others would wait.
        """
        with self._lock:
            late = self.runs[-KEPT:]
        mine = [r for r in late if r.scaling is scaling and not r.scale_moved]
        return [run for run in mine if run.overflowed_on_host]

    def any_overflowed(self) -> bool:
        """Whether gradients that are there now hold an overflow; waits for the device.

        Until the next backward, the gradients of a step just skipped still do.
        """
        with self._lock:
            runs = [r for r in self.runs if not (r.voided or r.is_orphaned)]
        return any(run.overflowed for run in runs)

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
        """Drops runs that filled gradients of `held`, by `id`: scaled no more."""
        with self._lock:
            self.runs = [r for r in self.runs if not r.leaves.are_among(held)]

    def forget(self, number: int) -> None:
        """Drops runs up to `number`, which every known optimizer has read.

        The last `KEPT` are kept.
        """
        with self._lock:
            self._read = number
            old, kept = self.runs[:-KEPT], self.runs[-KEPT:]
            self.runs = [r for r in old if r.number > number] + kept


def _merged(runs: list[GraphRun]) -> list[GraphRun]:
    """One run for all with the same graph, leaves and lost gradients, flags merged."""
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
"""The runs of the whole process: one optimizer may hold weights of several models."""


def watch(
    run: GraphRun, results: Iterable[Any], leaves: Sequence[torch.Tensor]
) -> None:
    """Notes a backward as soon as it reaches one of the outputs of a run's graph.

    Args:
        results: the outputs.  Their hooks hold `leaves`, as their history does anyway.
        leaves: the leaf tensors of the run.
    """
    hook = functools.partial(_reached, run, leaves)
    for value in results:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            compat.hook_gradient(value, hook)


@compat.never_captured
def _reached(run: GraphRun, leaves: Sequence[torch.Tensor], _: torch.Tensor) -> None:
    backward_id = compat.backward_id()
    if backward_id == run.backward_id:
        return
    run.unscale_if_foreign()
    BACKWARDS.note(run, backward_id, leaves)
    # Inside a backward gradients are on only where it has `create_graph=True`.
    run.recorded = run.recorded or torch.is_grad_enabled()


def lower_where_nobody_steps(scaling: ModelScaling) -> None:
    """Lowers the scale after an overflow where no optimizer's step does.

    A script may step by hand, or only look at gradients.  The script has been given the
    infinite gradients of the backward that overflowed; the next gradients are not to be
    infinite.
    """
    for run in BACKWARDS.overflowed(scaling):
        run.scale_moved = True
        if run.backward_pass.overflowed:
            continue  # another run of this backward has lowered the scale
        overflow = compat.clear_flag().fill_(1.0)
        run.backward_pass.note_move(overflow)
        scaling.loss_scale.update(overflow)
        if not scaling.ledger.told:
            scaling.ledger.told = True
            logger.warning(
                "autoamp: gradients of %s overflowed at loss scale %g, and no "
                "torch.optim optimizer steps its weights, which would skip such a "
                "step: the script has been given infinite gradients. The scale is "
                "lowered for the next ones; give %s, or bf16, to be safe",
                scaling.label,
                scaling.loss_scale.scale,
                scaling.advice("loss_scale", 1),
            )
