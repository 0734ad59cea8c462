"""Reads the evidence for a step: the backwards since the last step, and their flags."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from autoamp import compat
from autoamp.training.guard import cannot_read, guards_of
from autoamp.training.ledger.backwards import BACKWARDS
from autoamp.training.ledger.graph_run import BackwardPass, GraphRun, Sizes, largest_of
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.ranks import Team, judged, team_of
from autoamp.training.step.boundary import BOUNDARIES, OptimizerBoundary


class Reading(NamedTuple):
    """The evidence for one step.

    Attributes:
        params: the tensors that the step would change.
        evidence: the runs that concern the step.
        guards: the models for whose sake all gradients must be finite.
        team: the ranks that make the step together.
        known: whether there is anything by which the step could be skipped.
        flag: one fp32 element, 1 where gradients overflow: on this rank as the step is
            read, on any rank once the ranks have agreed.
        sizes: how large gradients are, on this rank or on all, likewise.
    """

    params: Sequence[torch.Tensor]
    evidence: Evidence
    guards: Sequence[ModelScaling]
    team: Team
    known: bool
    flag: torch.Tensor
    sizes: Sizes


def read(boundary: OptimizerBoundary) -> Reading:
    """Reads the backwards since the last step; links the models that they concern."""
    params = boundary.params
    evidence = read_evidence(boundary, params)
    doubt = _in_doubt(boundary, params)
    guards = guards_of(boundary.optimizer, params)
    for scaling in guards:
        if not scaling.enabled:
            boundary.link(scaling)
    for scaling in evidence.scalings:
        scaling.ledger.set_foreign(False)
        boundary.link(scaling)
    low = any(s.ledger.runs_low for s in guards)
    guarded = low and not cannot_read(boundary.optimizer)
    team = team_of(judged(boundary.scalings), params)
    known = bool(evidence.runs or evidence.elsewhere or doubt or team.groups or guarded)
    if not known:
        return Reading(params, evidence, guards, team, known, compat.clear_flag(), {})
    flag = found_inf(evidence, params, team, doubt, guarded)
    return Reading(params, evidence, guards, team, known, flag, _sizes(evidence.runs))


def read_evidence(
    boundary: OptimizerBoundary, params: Sequence[torch.Tensor]
) -> Evidence:
    """The runs since the last step; forgets the runs that all boundaries have read."""
    evidence = gather(params, boundary.last_read, boundary.scalings)
    boundary.last_read = evidence.last
    if BACKWARDS.runs:
        BACKWARDS.forget(min((b.last_read for b in list(BOUNDARIES)), default=-1))
    return evidence


def _in_doubt(boundary: OptimizerBoundary, params: Sequence[torch.Tensor]) -> bool:
    """Whether gradients of a skipped step may still be there, and new ones on top.

    Where only a kernel has read the flag, the last step may have been skipped; but the
    gradients of that step are gone where the next backward found no gradients.
    """
    if boundary.skipped_before or not boundary.unsure:
        return boundary.skipped_before
    ids = {id(p) for p in params}
    return any(run.lives_in(ids) for run in boundary.unsure)


def _sizes(runs: Sequence[GraphRun]) -> Sizes:
    """How large gradients were, for each loss scale that is to move for `runs`."""
    fresh = [run for run in runs if not run.scale_moved]
    backwards: dict[int, set[BackwardPass]] = {}
    for run in fresh:
        backwards.setdefault(id(run.scaling.loss_scale), set()).add(run.backward_pass)
    return {scale: largest_of(mine, fresh) for scale, mine in backwards.items()}


@dataclass(frozen=True)
class Evidence:
    """The runs that concern one optimizer since its last step.

    Attributes:
        live: runs whose gradients the optimizer is about to read.
        doubtful: runs that may have found an overflow in gradients that have since been
            thrown away, or have passed it on to weights that no graph of ours knows.
        elsewhere: runs for other optimizers that may have passed an overflow on.
        last: the number of the last run; the next step looks at the runs after it.
        sharded: whether FSDP has sharded the weights.
    """

    live: Sequence[GraphRun]
    doubtful: Sequence[GraphRun]
    elsewhere: Sequence[GraphRun]
    last: int
    sharded: bool = False

    @property
    def scalings(self) -> list[ModelScaling]:
        """The models concerned, each once."""
        return list({id(r.scaling): r.scaling for r in self.runs}.values())

    @property
    def runs(self) -> list[GraphRun]:
        return [*self.live, *self.doubtful]

    @property
    def watched_elsewhere(self) -> list[ModelScaling]:
        """The watched models whose runs for other optimizers have passed nothing on."""
        watched = [r for r in self.elsewhere if r.scaling.skip_watch.watching]
        return [r.scaling for r in watched if not any(map(bool, r.found_inf))]

    def blaming_elsewhere(self) -> Evidence:
        """The evidence where gradients of this optimizer are known to overflow.

        The runs that may have passed the overflow on count as this optimizer's own.
        The optimizers that hold the weights of these runs may never lower the loss
        scale: their own gradients may be thrown away before they step.
        """
        blamed = [r for r in self.elsewhere if any(map(bool, r.found_inf))]
        return replace(self, doubtful=[*self.doubtful, *blamed], elsewhere=[])


def gather(
    params: Sequence[torch.Tensor], since: int, met: Collection[ModelScaling] = ()
) -> Evidence:
    """The runs after number `since` whose backward filled gradients of `params`.

    A run that fills no gradients itself (a piece of a model between two graph breaks)
    counts with the other runs of its backward.  A backward that fills no gradients of
    any optimizer (through a frozen critic) is taken to be for the optimizer that steps
    next.

    A run whose weights are gone, or moved, may have filled gradients of `params`, so
    that the gradients themselves have to tell.  Such a run counts only if it is of a
    model that the optimizer has `met`, because the optimizer keeps that model's weights
    alive: the ids of another model's weights may by now be ids of foreign tensors.

    The tensors that FSDP gathers for a graph belong to no optimizer: there every run of
    the optimizer's models counts, and the gradients themselves have to tell.
    """
    runs = BACKWARDS.since(since)
    if not runs:
        return Evidence([], [], [], since, sharded=bool(compat.shard_groups(params)))
    held = {id(p): p for p in params}
    mine = [r for r in runs if _concerns(r, held, met)]
    orphaned = {r.backward_id for r in mine if r.is_orphaned}
    live = [r for r in mine if r.backward_id not in orphaned and r.lives_in(held)]
    passes, living = {r.backward_id for r in mine}, {r.backward_id for r in live}
    pieces = [r for r in runs if not r.leaves.ids and r.backward_id in passes]
    live += [r for r in pieces if r.backward_id in living]
    voided = [r for r in (*mine, *pieces) if r not in live]
    last = runs[-1].number if runs else since
    others = [r for r in runs if r.backward_id not in passes]
    if compat.shard_groups(params):
        doubtful = _of_the_same_models([*voided, *others], held, met)
        return Evidence(live, doubtful, [], last, sharded=True)
    passing = [r for r in others if r.origin.passes_on and _may_concern(r, met)]
    filling = _filling(runs) if passing else set()
    return Evidence(
        live,
        [*voided, *(r for r in passing if r.backward_id not in filling)],
        [r for r in passing if r.backward_id in filling],
        last,
    )


def _filling(runs: Sequence[GraphRun]) -> set[int]:
    """The backwards that fill gradients of tensors that some optimizer holds."""
    held = {id(p) for boundary in list(BOUNDARIES) for p in boundary.params}
    return {run.backward_id for run in runs if run.may_touch(held)}


def _of_the_same_models(
    runs: Sequence[GraphRun],
    held: Mapping[int, torch.Tensor],
    met: Collection[ModelScaling],
) -> list[GraphRun]:
    """The runs of models that have some of the tensors `held` among their weights."""
    unmet = {run.scaling for run in runs}.difference(met)
    others = {s for s in unmet if held.keys().isdisjoint(map(id, s.weights))}
    return [run for run in runs if run.scaling not in others]


def _concerns(
    run: GraphRun, held: Mapping[int, torch.Tensor], met: Collection[ModelScaling]
) -> bool:
    """Whether a run filled, or may have filled, gradients of the tensors `held`."""
    if run.scaling in met:
        return run.may_touch(held) and not run.is_of_nobody
    return run.touches(held)


def _may_concern(run: GraphRun, met: Collection[ModelScaling]) -> bool:
    """Whether an overflow that a run passed on may be in some tensor's gradient now."""
    return run.scaling in met or run.origin.graph() is not None


def found_inf(
    evidence: Evidence,
    params: Sequence[torch.Tensor],
    team: Team,
    doubt: bool,
    guarded: bool = False,
) -> torch.Tensor:
    """One fp32 element, 1 where this rank sees an overflow in gradients of `params`.

    The flags of the live runs tell, because the gradients may have changed since:
    clipping by value turns infinities into ones.  The gradients themselves are only
    looked at where they may still hold an overflow of a skipped step (`doubt`), of a
    run that is voided or passed gradients on, or of other ranks, whose gradients the
    script reduced by itself, or that a communication hook has compressed.

    Where the step is `guarded`, gradients that no live run has filled, of which no flag
    tells, are looked at too: all of them, where graphs are not scaled.

    In `join()` the gradients alone tell: they are equal on the ranks that still step.
    """
    if team.is_joining:
        return not_finite(p.grad for p in params if p.grad is not None)
    # Copies, because a later backward may write to the flags of a run.
    flags = [flag.clone() for run in evidence.live for flag in run.found_inf]
    unclear = [*evidence.doubtful, *evidence.elsewhere]
    past = [flag for run in unclear for flag in run.found_inf]
    on_host = all(flag.device.type == "cpu" for flag in past)
    if (
        doubt
        or evidence.sharded
        or team.gradients_tell_more
        or _may_hold_other_ranks(evidence)
        or (any(bool(f) for f in past) if on_host else past)
    ):
        flags.append(not_finite(p.grad for p in params if p.grad is not None))
    elif guarded:
        told = [run.leaves.known - run.gone for run in evidence.live]
        known = frozenset().union(*told)
        left = [p.grad for p in params if p.grad is not None and id(p) not in known]
        if left:
            flags.append(not_finite(left))
    return _any(flags)


def _may_hold_other_ranks(evidence: Evidence) -> bool:
    """Whether gradients may hold other ranks' overflows, of which no flag tells.

    Either the script reduces gradients by itself, or DDP has reduced the gradients of
    layers before a model: a rank's own runs for such layers may all be finite.
    """
    if not compat.are_several():
        return False
    passed_on = evidence.doubtful or evidence.elsewhere
    return bool(passed_on) or not all(run.reduced for run in evidence.live)


def not_finite(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """One fp32 element, 1 where any of `grads` holds an infinity or NaN."""
    grads = [*grads]
    devices = {grad.device for grad in grads}
    if len(devices) == 1:
        return compat.any_not_finite(grads)
    by_device = [[g for g in grads if g.device == device] for device in devices]
    return _any([compat.any_not_finite(each) for each in by_device])


def _any(flags: Sequence[torch.Tensor]) -> torch.Tensor:
    if not flags:
        return compat.clear_flag()
    if len(flags) == 1:
        return flags[0]
    device = flags[0].device
    return torch.stack([f.to(device) for f in flags]).amax(0)
