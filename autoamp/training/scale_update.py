"""How a step moves the loss scales of the runs it read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoamp import compat
from autoamp.training.ledger.evidence import newly
from autoamp.training.ledger.graph_run import BackwardPass, GraphRun, largest_of
from autoamp.training.ranks import Sizes
from autoamp.training.scale.base import free_to_read


def sizes_in(runs: list[GraphRun]) -> Sizes:
    """How large gradients were, for each loss scale that is to move for `runs`."""
    fresh = [run for run in runs if not run.scale_moved]
    backwards: dict[int, set[BackwardPass]] = {}
    for run in fresh:
        backwards.setdefault(id(run.scaling.loss_scale), set()).add(run.backward_pass)
    return {scale: largest_of(mine, fresh) for scale, mine in backwards.items()}


def largest_in(steps: Sequence[Sizes]) -> Sizes:
    """How large gradients were in several evaluations of one step."""
    found: Sizes = {}
    for sizes in steps:
        for scale, largest in sizes.items():
            before = found.get(scale, largest)
            if before is None or largest is None:
                found[scale] = None
            else:
                found[scale] = before.maximum(largest)
    return found


def update_scales(
    runs: list[GraphRun], flag: torch.Tensor, sizes: Sizes, retries: bool
) -> None:
    """Moves each loss scale once, for the runs that have not moved it yet.

    Two optimizers that step after one backward move its loss scale once.

    Args:
        runs: the runs that filled the gradients of a step.
        flag: 1 element, on any device; not 0 where some gradient is not finite.
        sizes: as `sizes_in` gives them, or as ranks have agreed on them.
        retries: whether the step evaluates the loss again; such a step is counted when
            it ends, by the caller.
    """
    fresh = [run for run in runs if not run.scale_moved]
    for scale in {id(s): s for s in (r.scaling.loss_scale for r in fresh)}.values():
        mine = {r.backward_pass for r in fresh if r.scaling.loss_scale is scale}
        before = [b.moved_by for b in mine if b.moved_by is not None]
        if len(before) < len(mine):
            wanted = scale.wants_size
            scale.update(flag)
            if wanted:
                known = bool(flag) if free_to_read(flag) else flag
                scale.note_size(sizes.get(id(scale)), known)
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
