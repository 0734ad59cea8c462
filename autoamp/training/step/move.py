"""Moves the loss scales, counters and marks after a step has been decided."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoamp import compat
from autoamp.errors import LossScaleError
from autoamp.training.ledger.backwards import BACKWARDS
from autoamp.training.ledger.buffers import HOLDING
from autoamp.training.ledger.graph_run import GraphRun, Sizes
from autoamp.training.scale.base import free_to_read
from autoamp.training.skips import count_skips, note_skip, note_step
from autoamp.training.step.boundary import OptimizerBoundary
from autoamp.training.step.decide import Decision, Way
from autoamp.training.step.read import Reading
from autoamp.training.step.wrappers import find, show, show_on_wrappers


def move(boundary: OptimizerBoundary, reading: Reading, decision: Decision) -> None:
    """Moves loss scales and counters for a step, and marks the step on the optimizer.

    A step that the kernel decides is marked after it (see `given_flag`), but for the
    wrappers of the optimizer.

    Raises:
        LossScaleError: gradients overflow at the lowest loss scale allowed.
    """
    boundary.log(decision.reason)
    settle_buffers(boundary, reading, decision)
    if reading.known:
        runs = _note(boundary, reading, decision)
        update_scales(runs, reading.flag, reading.sizes, retries=False)
        count_skips(reading.guards, reading.flag)
    if decision.way is not Way.BY_KERNEL:
        _mark(boundary, decision.way is Way.SKIP)
        return
    boundary.steps += 1
    assert decision.flag is not None
    boundary.tell(decision.flag)
    if find(boundary):
        show_on_wrappers(boundary, decision.flag.reshape(()) != 0)
    boundary.skipped_before = False  # the host does not know: see `unsure`
    boundary.unsure = reading.evidence.live or boundary.unsure


def move_evaluation(
    boundary: OptimizerBoundary, reading: Reading, decision: Decision
) -> None:
    """Moves loss scales after one evaluation of a step's closure that overflowed.

    The evaluations without overflow move the scales together, when the step ends.

    Raises:
        LossScaleError: gradients overflow at the lowest loss scale allowed.
    """
    boundary.log(decision.reason)
    if decision.overflow:
        settle_buffers(boundary, reading, decision)
    if not reading.known:
        return
    runs = _note(boundary, reading, decision)
    if decision.overflow:
        update_scales(runs, reading.flag, reading.sizes, retries=True)
    else:
        boundary.passed += runs
        boundary.passed_sizes.append(reading.sizes)


def end_evaluations(boundary: OptimizerBoundary, skipped: bool = False) -> None:
    """Ends a step of several evaluations: the step counts once, not once for each."""
    flag = compat.clear_flag().fill_(float(skipped))
    if not skipped:
        sizes = largest_in(boundary.passed_sizes)
        update_scales(boundary.passed, flag, sizes, retries=True)
    for scaling in boundary.scalings:
        scaling.ledger.buffers.forget()
    for scale in boundary.loss_scales:
        scale.count_skipped(flag)
    count_skips(boundary.scalings, flag)
    boundary.passed, boundary.passed_sizes = [], []
    _mark(boundary, skipped)


def settle_buffers(
    boundary: OptimizerBoundary, reading: Reading, decision: Decision
) -> None:
    """Undoes the writes of forwards to buffers where their step is skipped.

    A backward may have gone through models whose weights another optimizer steps: the
    critic of a generator.
    """
    if not HOLDING:
        return
    passes = {run.backward_id for run in reading.evidence.runs}
    reached = [r.scaling for r in BACKWARDS.runs if r.backward_id in passes]
    for scaling in {*boundary.scalings, *reading.guards, *reached}:
        buffers = scaling.ledger.buffers
        if decision.overflow:
            buffers.put_back()
        elif decision.overflow is None and decision.flag is not None:
            buffers.put_back(decision.flag)
        else:
            buffers.forget()


def _note(
    boundary: OptimizerBoundary, reading: Reading, decision: Decision
) -> list[GraphRun]:
    """Says why a step is skipped, or ends the watch after earlier skipped steps.

    Returns:
        The runs for which loss scales are to move.
    """
    evidence, guards = reading.evidence, reading.guards
    if decision.overflow is False:
        concerned = [*evidence.scalings, *guards, *evidence.watched_elsewhere]
        note_step(concerned, id(boundary.optimizer))
    elif decision.overflow:
        evidence = evidence.blaming_elsewhere()
        try:
            by = id(boundary.optimizer)
            note_skip(evidence, reading.params, guards, by)
        except LossScaleError:
            _mark(boundary, True)
            raise
    return evidence.runs


def _mark(boundary: OptimizerBoundary, skipped: bool) -> None:
    """Counts a step; the optimizer shows whether the step was skipped."""
    boundary.steps += 1
    show(boundary, skipped)
    boundary.skipped_before, boundary.unsure = skipped, ()
    if skipped:
        compat.mark_stepped(boundary.optimizer)
    boundary.tell(skipped)


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
    if not runs:
        return
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


def newly(flag: torch.Tensor, before: Sequence[torch.Tensor]) -> torch.Tensor:
    """`flag` where none of the flags `before` is set, else 0."""
    for other in before:
        flag = flag * (1 - other.to(flag.device))
    return flag
