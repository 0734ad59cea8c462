"""Takes or skips one step of an optimizer: read, agree, decide, move.

`read` collects what is known of a step in one record, a `Reading`; `agree` makes it the
same on all ranks; `decide` chooses the way of the step; `move` moves loss scales,
counters and marks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from autoamp import compat
from autoamp.errors import LossScaleError, RankError
from autoamp.training.boundary import (
    BOUNDARIES,
    OptimizerBoundary,
    Step,
    closure_of,
)
from autoamp.training.buffers import HOLDING
from autoamp.training.guard import cannot_read, guards_of
from autoamp.training.ledger import BACKWARDS, GraphRun, Sizes, sizes_of
from autoamp.training.ranks import Team, judged, shake_hands, team_of
from autoamp.training.scale import LossScale, free_to_read, newly, scalar
from autoamp.training.scaling import ModelScaling
from autoamp.training.skips import note_skip, note_step, say_foreign

_ASK_EVERY = 100
"""After so many steps a flag that only a kernel reads is read here too, with a wait."""

_SCALES = 4
"""The most loss scales of one optimizer that ranks keep equal.  Models joined by a
backward share one scale, and a vector of one length needs no second collective."""

_SILENT, _UNKNOWN = -torch.inf, torch.inf
"""A number with no part in a largest value, and one that makes the value unknown."""

_INFINITE = torch.finfo(torch.float32).max
"""Stands for a gradient that is not finite."""


class Way(Enum):
    """The ways in which a step may go on, each with a clause for the log."""

    STEP = "no gradient overflows"
    SKIP = "gradients overflow"
    BY_KERNEL = "the optimizer's kernel decides"
    """The optimizer's kernel reads the flag, and steps or skips by it."""
    RETRY = "gradients overflow, and a lower loss scale may cure that"
    """The closure is evaluated again, at a lower loss scale."""


class Evidence(NamedTuple):
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
    def runs(self) -> list[GraphRun]:
        return [*self.live, *self.doubtful]

    @property
    def scalings(self) -> list[ModelScaling]:
        """The models concerned, each once."""
        return list({id(r.scaling): r.scaling for r in self.runs}.values())


class Reading(NamedTuple):
    """The facts that one step is decided on.

    Attributes:
        params: the tensors that the step would change.
        evidence: the runs that concern the step.
        guards: the models for whose sake all gradients must be finite.
        team: the ranks that make the step together.
        known: whether any flag or gradient could tell of an overflow; if not, the step
            is taken without a look.
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


# -- take ------------------------------------------------------------------------------


def take(
    boundary: OptimizerBoundary,
    inner: Step,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls `inner(*args, **kwargs)`, the step as it was, or skips the step.

    A skipped step changes no weight and no state, fires no hook, and gives the
    closure's loss or None.

    Raises:
        LossScaleError: gradients overflow at the lowest loss scale allowed.
    """
    compiled = torch.compiler.is_dynamo_compiling()
    decided = _decided_in_python if compiled else _decided
    way, flag, loss, args, kwargs = decided(boundary, args, kwargs)
    if way is Way.SKIP:
        return loss
    if way is Way.BY_KERNEL:
        with _given_flag(boundary.optimizer, flag):
            return inner(*args, **kwargs)
    return inner(*args, **kwargs)


@compat.never_captured
def _decided(
    boundary: OptimizerBoundary, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Way, Any, Any, tuple[Any, ...], dict[str, Any]]:
    """The way of a step, its flag, its closure's loss, and the arguments for it."""
    if leaves_to_scaler(boundary):
        optimizer: Any = boundary.optimizer
        # A GradScaler hands found_inf to a fused optimizer, whose kernel decides; it
        # calls any other step only where nothing overflowed.
        found = getattr(optimizer, "found_inf", None)
        boundary.show(found is not None and found.reshape(()) != 0)
        boundary.log("a GradScaler decides about the step")
        for scaling in boundary.scalings:
            # A GradScaler undoes no write to a buffer; neither do we for its steps.
            scaling.ledger.buffers.forget()
        return Way.STEP, None, None, args, kwargs
    loss, args, kwargs = evaluated(args, kwargs)
    way, flag = judge(boundary)
    return way, flag, loss, args, kwargs


# Where the user compiles the step, the compiler is to leave this call alone.
_decided_in_python = torch.compiler.disable(_decided)


def judge(
    boundary: OptimizerBoundary, *, begun: bool = False
) -> tuple[Way, torch.Tensor]:
    """The way of a step, and its flag; everything but the weights has been moved.

    Args:
        begun: whether the step has begun, so that no kernel can be given the flag.
    """
    reading = agree(boundary, read(boundary))
    way, overflow = decide(boundary, reading, begun=begun)
    move(boundary, reading, way, overflow)
    return way, reading.flag


def leaves_to_scaler(boundary: OptimizerBoundary) -> bool:
    """Whether a GradScaler makes this step, and scales, or the boundary is off."""
    if boundary.off:
        return True
    if not compat.stepped_by_grad_scaler(boundary.optimizer):
        return False
    for scaling in _read_evidence(boundary, boundary.params).scalings:
        if not scaling.ledger.foreign or scaling not in boundary.scalings:
            say_foreign(scaling)
        scaling.ledger.set_foreign(True)
        boundary.link(scaling)
    found = getattr(boundary.optimizer, "found_inf", None)  # where it is fused
    boundary.tell(False if found is None else found.reshape(()))
    return True


def evaluated(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    params: Sequence[torch.Tensor] = (),
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Evaluates a step's closure once; gives the loss, and new arguments for the step.

    The closure's backward has to be over before the step can be judged.  The new
    arguments hold a closure whose first call returns the known loss, unless the
    optimizer has zeroed the gradients of `params` before that call.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        return None, args, kwargs
    # Torch calls a step under `no_grad`, and turns gradients on for the closure.
    with torch.enable_grad():
        loss = closure()
    ready = [loss]
    versions = _versions(params)

    # LBFGS and SAM evaluate the closure again after they have moved the weights: the
    # known loss stands for the first evaluation only.
    def again() -> Any:
        if ready and _versions(params) == versions:
            return ready.pop()
        ready.clear()
        return closure()

    if args:
        return loss, (again, *args[1:]), kwargs
    return loss, args, {**kwargs, "closure": again}


def _versions(params: Sequence[torch.Tensor]) -> list[int | None]:
    return [None if p.grad is None else compat.version(p.grad) for p in params]


# -- read ------------------------------------------------------------------------------


def read(boundary: OptimizerBoundary) -> Reading:
    """Reads the backwards since the last step; links the models that they concern."""
    params = boundary.params
    evidence = _read_evidence(boundary, params)
    doubt = _in_doubt(boundary, params)
    guards = guards_of(boundary.optimizer, params)
    for scaling in guards:
        if not scaling.enabled:
            boundary.link(scaling)
    for scaling in evidence.scalings:
        # No GradScaler makes this step (see `leaves_to_scaler`): autoamp scales.
        scaling.ledger.set_foreign(False)
        boundary.link(scaling)
    low = any(s.ledger.runs_low for s in guards)
    guarded = low and not cannot_read(boundary.optimizer)
    team = team_of(judged(boundary.scalings), params)
    known = bool(evidence.runs or evidence.elsewhere or doubt or team.groups or guarded)
    if not known:
        return Reading(params, evidence, guards, team, known, compat.clear_flag(), {})
    flag = _found_inf(evidence, params, team, doubt, guarded)
    return Reading(params, evidence, guards, team, known, flag, sizes_of(evidence.runs))


def _read_evidence(
    boundary: OptimizerBoundary, params: Sequence[torch.Tensor]
) -> Evidence:
    """The runs since the last step; forgets the runs that all boundaries have read."""
    evidence = gather(params, boundary.last_read, boundary.scalings)
    boundary.last_read = evidence.last
    if BACKWARDS.runs:
        # An optimizer that steps seldom keeps the runs that it has yet to read.
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
    sharded = bool(compat.shard_groups(params))
    if not runs:
        return Evidence([], [], [], since, sharded)
    held = {id(p): p for p in params}
    mine = [r for r in runs if _concerns(r, held, met)]
    orphaned = {r.backward_id for r in mine if r.is_orphaned}
    # A weight that was frozen since its gradient was thrown away has none to step with.
    filled = {key for key, p in held.items() if p.grad is not None}
    live = [r for r in mine if r.backward_id not in orphaned and r.lives_in(filled)]
    passes, living = {r.backward_id for r in mine}, {r.backward_id for r in live}
    pieces = [r for r in runs if not r.leaves.ids and r.backward_id in passes]
    live += [r for r in pieces if r.backward_id in living]
    voided = [r for r in (*mine, *pieces) if r not in live]
    others, last = [r for r in runs if r.backward_id not in passes], runs[-1].number
    if sharded:
        doubtful = _of_the_same_models([*voided, *others], held, met)
        return Evidence(live, doubtful, [], last, sharded)
    passing = [r for r in others if r.origin.passes_on and _may_concern(r, met)]
    filling = _filling(runs) if passing else set()
    doubtful = voided + [r for r in passing if r.backward_id not in filling]
    elsewhere = [r for r in passing if r.backward_id in filling]
    return Evidence(live, doubtful, elsewhere, last)


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
    if run.scaling not in met:
        return run.leaves.are_among(held)
    model_is_gone = run.is_orphaned and run.origin.graph() is None
    return run.may_touch(held) and not model_is_gone


def _may_concern(run: GraphRun, met: Collection[ModelScaling]) -> bool:
    """Whether an overflow that a run passed on may be in some tensor's gradient now."""
    return run.scaling in met or run.origin.graph() is not None


def _found_inf(
    evidence: Evidence,
    params: Sequence[torch.Tensor],
    team: Team,
    doubt: bool,
    guarded: bool,
) -> torch.Tensor:
    """One fp32 element, 1 where this rank sees an overflow in gradients of `params`.

    Args:
        doubt: whether gradients of a skipped step may still be there.
        guarded: whether gradients of which no flag tells are looked at too.
    """
    if team.is_joining:  # gradients are equal on the ranks that still step
        return not_finite(p.grad for p in params if p.grad is not None)
    # Flags come before gradients, which may have changed since the backward: clipping
    # by value turns an infinity into a one.  The flags are copied, because a later
    # backward may write to them.
    flags = [flag.clone() for run in evidence.live for flag in run.found_inf]
    unclear = [*evidence.doubtful, *evidence.elsewhere]
    past = [flag for run in unclear for flag in run.found_inf]
    # A flag on a device is not read here, since the host would wait: gradients that it
    # may be about are looked at instead, on the device.
    on_host = all(flag.device.type == "cpu" for flag in past)
    # The gradients themselves are read only where no flag tells all: an overflow may be
    # left from a skipped step, have been passed on, or come from another rank, whose
    # gradients the script reduced, or a communication hook compressed.
    if (
        doubt
        or evidence.sharded
        or team.gradients_tell_more
        or _may_hold_other_ranks(evidence)
        or (any(bool(f) for f in past) if on_host else past)
    ):
        flags.append(not_finite(p.grad for p in params if p.grad is not None))
    elif guarded:
        # The flags of live runs have judged these gradients where they left the graph.
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
    # One kernel takes the tensors of one device.
    by_device = [[g for g in grads if g.device == device] for device in devices]
    return _any([compat.any_not_finite(each) for each in by_device])


def _any(flags: Sequence[torch.Tensor]) -> torch.Tensor:
    if not flags:
        return compat.clear_flag()
    if len(flags) == 1:
        return flags[0]
    device = flags[0].device
    return torch.stack([f.to(device) for f in flags]).amax(0)


# -- agree -----------------------------------------------------------------------------
#
# Ranks step together or not at all, and a rank that skips a collective hangs all
# others.  So a rank takes part in an agreement because of the weights that its
# optimizer holds, never because of what the rank's own graphs did in the step: a rank's
# model may have run no graph at all.


def agree(boundary: OptimizerBoundary, reading: Reading) -> Reading:
    """The reading that holds on all ranks; makes the loss scales equal there.

    Raises:
        RankError: a rank has left; or, at the first step, a rank does not answer, or
            has converted its models otherwise.
    """
    team = reading.team
    if not team.groups:
        return reading
    scalings = judged(boundary.scalings)
    shake_hands(boundary.optimizer, team, scalings, reading.params)
    if team.is_joining:  # the gradients were looked at, and they are the same
        flag, sizes = reading.flag, dict.fromkeys(reading.sizes)
    else:
        flag, sizes = _reduced(reading, boundary.loss_scales[:_SCALES])
    team.recover(flag)
    return reading._replace(flag=flag, sizes=sizes)


def _reduced(
    reading: Reading, scales: Sequence[LossScale]
) -> tuple[torch.Tensor, Sizes]:
    """The largest flag and sizes of all ranks, by one reduction of one small vector.

    The same reduction makes the loss scales equal.
    """
    team, sizes = reading.team, reading.sizes
    rows = [_row(scale, sizes) for scale in scales]
    # Every rank hands in a vector of the same length, whatever models it has met: a
    # collective of unequal lengths hangs, or mixes the numbers up.
    rows += [[scalar(_SILENT)] * 3] * (_SCALES - len(scales))
    numbers = [reading.flag.reshape(()), *(number for row in rows for number in row)]
    ours = torch.stack([n.to(team.device, torch.float32) for n in numbers])
    # `all_reduce` writes in place, and `ours` is compared with the result.
    agreed = ours.clone()
    try:
        for group in team.groups:
            # MAX serves all numbers: one rank's flag is every rank's flag, a size is
            # the largest, and positions come negated, so that the lowest scale wins.
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX, group)
    except RuntimeError as error:
        raise RankError(
            "a rank does not take part in the agreement whether to make this optimizer "
            f"step: {str(error).partition(chr(10))[0]}. It has died or raised, or it "
            "steps another optimizer: see what each rank said last, and start all "
            "ranks again"
        ) from error
    # On a GPU a comparison would wait, so that the scale is set in any case.
    known = free_to_read(agreed)
    for scale, mine, other in zip(
        scales, ours[1:].split(3), agreed[1:].split(3), strict=False
    ):
        if not (known and torch.equal(mine[:2], other[:2])):
            # After uneven inputs, say, the scales differ: the lowest is safe for all.
            scale.set_agreed(-other[0], -other[1])
        if (
            id(scale) in sizes and scale.wants_size
        ):  # the few looks may wait for a device
            sizes[id(scale)] = _size(other[2])
    return agreed[:1], sizes


def _row(scale: LossScale, sizes: Sizes) -> list[torch.Tensor]:
    """The numbers that ranks reduce for one scale: its position, and the size."""
    if id(scale) not in sizes:
        return [scalar(_SILENT)] * 3
    largest = sizes[id(scale)]
    if largest is None:
        largest = scalar(_UNKNOWN)
    else:
        # A size that is infinite is known all the same; infinity is `_UNKNOWN` here.
        largest = largest.nan_to_num(_INFINITE, _INFINITE)
    return [*(-each for each in scale.position), largest]


def _size(largest: torch.Tensor) -> torch.Tensor | None:
    if not bool(largest < _UNKNOWN):
        return None
    return torch.where(largest < _INFINITE, largest, torch.inf)


# -- decide ----------------------------------------------------------------------------


def decide(
    boundary: OptimizerBoundary, reading: Reading, *, begun: bool = False
) -> tuple[Way, bool | None]:
    """The way of a step, and whether gradients overflow: None if the host won't know.

    Where the host waits for the flag, it knows of the overflow: the skipped step is
    reported, and is an error at the lowest loss scale, whatever the optimizer is.

    Args:
        begun: whether the step has begun, so that no kernel can be given the flag.
    """
    flag = reading.flag
    if begun or not _takes_flag(boundary.optimizer, flag):
        return (Way.SKIP, True) if bool(flag) else (Way.STEP, False)
    return Way.BY_KERNEL, bool(flag) if _host_looks(boundary, reading) else None


def _takes_flag(optimizer: Optimizer, flag: torch.Tensor) -> bool:
    """Whether a step can be skipped by the optimizer's kernel, without a wait."""
    if free_to_read(flag):
        return False
    groups = [g for g in optimizer.param_groups if g["params"]]
    return (
        bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        # A group may have an implementation of its own.
        and all(g.get("fused") for g in groups)
        # Fused SGD whose first step is skipped keeps momentum buffers of memory that
        # nothing has written: weights were off by 1e18 some steps later.
        and all(_has_state(optimizer, g) for g in groups)
    )


def _has_state(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether every weight that is about to be stepped has all of its state."""
    if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
        return True  # SGD without momentum never has state
    for p in group["params"]:
        known = optimizer.state.get(p)
        # A momentum buffer of None is one that no step has filled.
        if p.grad is not None and (
            not known or any(value is None for value in known.values())
        ):
            return False
    return True


def _host_looks(boundary: OptimizerBoundary, reading: Reading) -> bool:
    """Whether the host, too, reads the found_inf that the optimizer's kernel reads."""
    device: torch.device = boundary.params[0].device
    # CUDA refuses to wait for a stream that is being captured.
    if compat.is_capturing(device):
        return False
    evidence = reading.evidence
    concerned = [*evidence.scalings, *reading.guards]
    watching = any(s.skip_watch.watching for s in concerned)
    # An overflow that was passed on lowers a loss scale only where the host knows.
    due = (boundary.steps + 1) % _ASK_EVERY == 0
    return watching or due or bool(evidence.elsewhere)


@contextlib.contextmanager
def _given_flag(of: Optimizer, flag: torch.Tensor) -> Iterator[None]:
    """A region in which the optimizer's kernel reads `flag`; hooks fire as ever.

    Fused optimizers read `grad_scale` and `found_inf` for `torch.amp.GradScaler`.  At
    its end the optimizer shows whether the step was skipped, in a tensor.
    """
    optimizer: Any = of
    # The flag is made 0-dim, as GradScaler's is: Adam subtracts it from its 0-dim step
    # counters.
    optimizer.grad_scale, optimizer.found_inf = None, flag.reshape(())
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
        optimizer.step_was_skipped = flag.reshape(()) != 0


# -- move ------------------------------------------------------------------------------


def move(
    boundary: OptimizerBoundary, reading: Reading, way: Way, overflow: bool | None
) -> None:
    """Moves loss scales and counters for a step, and marks the step on the optimizer.

    A step that the kernel decides is marked after it (see `_given_flag`), but for the
    wrappers of the optimizer.

    Raises:
        LossScaleError: gradients overflow at the lowest loss scale allowed.
    """
    boundary.log(way.value)
    settle_buffers(boundary, reading, overflow)
    if reading.known:
        # First the message, then the move: the message tells the scale at which
        # gradients overflowed, and an overflow is an error only where the scale was at
        # its floor already.
        runs = note_overflow(boundary, reading, overflow)
        update_scales(runs, reading.flag, reading.sizes, reading.guards)
    if way is not Way.BY_KERNEL:
        mark(boundary, way is Way.SKIP)
        return
    boundary.steps += 1
    boundary.tell(reading.flag)
    boundary.find_wrappers()
    if boundary.wrappers:
        boundary.show_on_wrappers(reading.flag.reshape(()) != 0)
    boundary.skipped_before = False  # the host does not know: see `unsure`
    # A step without runs says nothing about the gradients of the steps before it.
    boundary.unsure = reading.evidence.live or boundary.unsure


def settle_buffers(
    boundary: OptimizerBoundary, reading: Reading, overflow: bool | None
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
        if overflow is False:
            buffers.forget()
        else:
            # Where only the device knows, it chooses between buffer and copy itself.
            buffers.put_back(reading.flag if overflow is None else None)


def note_overflow(
    boundary: OptimizerBoundary, reading: Reading, overflow: bool | None
) -> list[GraphRun]:
    """Says why a step is skipped, or ends the watch after earlier skipped steps.

    Returns:
        The runs for which loss scales are to move.
    """
    evidence, guards, by = reading.evidence, reading.guards, id(boundary.optimizer)
    runs = evidence.runs
    if overflow is False:
        watched = [r for r in evidence.elsewhere if r.scaling.skip_watch.watching]
        clean = [r.scaling for r in watched if not r.overflowed]
        note_step([*evidence.scalings, *guards, *clean], by)
    elif overflow:
        # Runs that passed the overflow on count as this optimizer's own.  The
        # optimizers that hold their weights may never lower the loss scale: their own
        # gradients may be thrown away before they step.
        runs += [r for r in evidence.elsewhere if r.overflowed]
        try:
            note_skip(runs, reading.params, guards, by)
        # The step is not taken: a script that catches the error finds it skipped.
        except LossScaleError:
            mark(boundary, True)
            raise
    return runs


def mark(boundary: OptimizerBoundary, skipped: bool) -> None:
    """Counts a step; the optimizer shows whether the step was skipped."""
    boundary.steps += 1
    boundary.show(skipped)
    boundary.skipped_before, boundary.unsure = skipped, ()
    if skipped:
        # `LRScheduler.step` warns "call optimizer.step() before lr_scheduler.step()" if
        # the step that it has wrapped was never reached.
        compat.mark_stepped(boundary.optimizer)
    boundary.tell(skipped)


def update_scales(
    runs: Sequence[GraphRun],
    flag: torch.Tensor,
    sizes: Sizes,
    guards: Sequence[ModelScaling] = (),
    *,
    retries: bool = False,
) -> None:
    """Moves each loss scale once, for the runs that have not moved it yet.

    A skipped step is counted on these loss scales, and for the models of `guards`.

    Two optimizers that step after one backward move its loss scale once.

    Args:
        runs: the runs that filled the gradients of a step.
        flag: 1 element, on any device; not 0 where some gradient is not finite.
        sizes: as `sizes_of` gives them, or as ranks have agreed on them.
        retries: whether the step evaluates the loss again; such a step is counted when
            it ends, by the caller.
    """
    on_host = free_to_read(flag)
    clean = on_host and not bool(flag)
    if not (retries or clean):
        for scale in (*_scales_of(runs), *unscaled(guards)):
            scale.count_skipped(flag)
    if not runs:
        return
    fresh = [run for run in runs if not run.scale_moved]
    for scale in _scales_of(fresh):
        passes = {r.backward_pass for r in fresh if r.scaling.loss_scale is scale}
        # A GAN's two optimizers step after one backward, and an optimizer that steps in
        # a hook does so before all flags of the backward are known: what has moved the
        # scale already is taken off.
        before = [b.moved_by for b in passes if b.moved_by is not None]
        if len(before) < len(passes):
            # This is asked before `update`, which counts down to the next look.
            wanted = scale.wants_size
            scale.update(flag)
            if wanted:
                known = bool(flag) if on_host else flag
                scale.note_size(sizes.get(id(scale)), known)
        else:
            scale.correct(newly(flag, before))
        for backward in passes:
            backward.note_move(flag)
    if compat.inside_backward():
        return  # the rest of the backward may overflow
    for run in runs:
        run.scale_moved = True
        run.clean = clean and not run.overflowed_on_host


def _scales_of(runs: Sequence[GraphRun]) -> list[LossScale]:
    """The loss scales of `runs`, each once."""
    return list({id(s): s for s in (r.scaling.loss_scale for r in runs)}.values())


def unscaled(scalings: Sequence[ModelScaling]) -> list[LossScale]:
    """The counters of those of `scalings` that have no loss scale, each once."""
    return list(
        {id(s.domain): s.domain.loss_scale for s in scalings if not s.enabled}.values()
    )
