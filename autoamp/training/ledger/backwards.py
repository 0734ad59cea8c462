"""The runs that backward passes have reached, until optimizers have read their flags.

Every run of a graph that is scaled at its edge is a `GraphRun`.  `watch` notes a run
here once a backward reaches the run; optimizer steps then read the run's flags.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from autoamp import compat
from autoamp.training.ledger.graph_run import BackwardPass, GraphRun
from autoamp.training.model_scaling import ModelScaling

logger = logging.getLogger(__name__)

KEPT = 64
"""Runs kept after every known optimizer has read them: an optimizer that is met later,
at its first step, may hold weights that the same backward reached."""

MOST = 1024
"""Runs kept for an optimizer that does not step; older runs are merged."""


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
        """Notes that backward `backward_id` has reached `run`.

        Args:
            leaves: the tensors whose gradients the run fills.
        """
        with self._lock:
            if run.backward_id != -1:
                self._part(run)
            self._number += 1
            run.number, run.backward_id, run.backward_pass = (
                self._number,
                backward_id,
                BackwardPass(),
            )
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
        """Notes which gradients of earlier backwards are gone as `run` starts afresh.

        Only some of those gradients may be gone: one of two optimizers zeroes its own.
        Each gradient is looked at where the host knows of an overflow; where a flag is
        on a device, the first gradient stands for all of them once every optimizer has
        read the flag.
        """
        afresh = bool(leaves) and leaves[0].grad is None
        for other in self.runs if afresh else self.runs[-KEPT:]:
            if other.clean or other.backward_id == run.backward_id or other.voided:
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
        """Drops runs that filled gradients of `held`, tensors that are scaled no more.

        Args:
            held: the tensors by their `id`.
        """
        with self._lock:
            self.runs = [r for r in self.runs if not r.touches(held)]

    def forget(self, number: int) -> None:
        """Drops runs up to `number`, but keeps the last `KEPT`.

        Every known optimizer has read the runs up to `number`.
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
