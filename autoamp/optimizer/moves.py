"""How a step moves the loss scales of the runs it read."""

from __future__ import annotations

import torch

from autoamp import compat
from autoamp.loss_scale.base import free_to_read
from autoamp.scaling.graph_run import GraphRun, largest_of
from autoamp.scaling.overflow import newly


def move_scales(runs: list[GraphRun], flag: torch.Tensor, retries: bool) -> None:
    """Moves each loss scale once, for the runs that have not moved it yet.

    Two optimizers that step after one backward move its loss scale once.

    Args:
        runs: the runs that filled the gradients of a step.
        flag: 1 element, on any device; not 0 where some gradient is not finite.
        retries: whether the step evaluates the loss again; such a step is counted when
            it ends, by the caller.
    """
    fresh = [run for run in runs if not run.scale_moved]
    for scale in {id(s): s for s in (r.scaling.loss_scale for r in fresh)}.values():
        mine = {r.backward_pass for r in fresh if r.scaling.loss_scale is scale}
        before = [b.moved_by for b in mine if b.moved_by is not None]
        if len(before) < len(mine):
            looks = scale.looks
            scale.update(flag)
            if looks:
                known = bool(flag) if free_to_read(flag) else flag
                scale.look(largest_of(mine, fresh), known)
        else:
            scale.correct(newly(flag, before))
        for backward in mine:
            backward.note_move(flag)
    # A step that is known to be taken is not counted.
    if not retries and not (free_to_read(flag) and not bool(flag)):
        concerned = [r.scaling.loss_scale for r in runs]
        for scale in {id(s): s for s in concerned}.values():
            scale.count_skipped(flag)
    if compat.inside_backward():
        return  # the rest of the backward may overflow
    clean = free_to_read(flag) and not bool(flag)
    for run in runs:
        run.scale_moved = True
        run.clean = clean and not run.overflowed_on_host
