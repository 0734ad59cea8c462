"""Takes or skips one step of an optimizer: read, agree, decide, move.

A step asks one question, in every precision: is every gradient that it is about to read
finite?  `read` looks at the gradients; `agree` makes the answer the same on all ranks;
`decide` chooses the way of the step; `move` moves counters and marks.  Loss scales are
moved by backwards, see `ledger`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from autoamp import compat
from autoamp.errors import LossScaleError, RankError
from autoamp.training.blame.skips import note_skip, note_step, say_foreign
from autoamp.training.boundary import OptimizerBoundary, Step, closure_of
from autoamp.training.buffers import HOLDING
from autoamp.training.guard import cannot_read, guards_of, is_guarded
from autoamp.training.ledger import BACKWARDS, GraphRun
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.ranks import Team, judged, shake_hands, team_of
from autoamp.training.scale import free_to_read

_ASK_EVERY = 100
"""After so many steps a flag that only a kernel reads is read here too, with a wait."""


class Way(Enum):
    """The ways in which a step may go on, each with a clause for the log."""

    STEP = "no gradient overflows"
    SKIP = "gradients overflow"
    BY_KERNEL = "the optimizer's kernel decides"
    """The optimizer's kernel reads the flag, and steps or skips by it."""
    RETRY = "gradients overflow, and a lower loss scale may cure that"
    """The closure is evaluated again, at a lower loss scale."""


class Reading(NamedTuple):
    """The facts that one step is decided on.

    Attributes:
        params: the tensors that the step would change.
        models: the models for whose sake all gradients must be finite.
        runs: the runs of the backwards through these models since the last step.
        team: the ranks that make the step together.
        known: whether the gradients were looked at; if not, the step is taken.
        flag: one fp32 element, 1 where a gradient is not finite: on this rank as the
            step is read, on any rank once the ranks have agreed.
    """

    params: Sequence[torch.Tensor]
    models: Sequence[ModelScaling]
    runs: Sequence[GraphRun]
    team: Team
    known: bool
    flag: torch.Tensor


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
    # Torch's own hook before the step is not to judge the step a second time.
    boundary.inside = True
    try:
        if way is Way.BY_KERNEL:
            with _given_flag(boundary.optimizer, flag):
                return inner(*args, **kwargs)
        return inner(*args, **kwargs)
    finally:
        boundary.inside = False


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
    boundary.last_read = BACKWARDS.last
    for scaling in guards_of(boundary.optimizer, boundary.params):
        if not scaling.ledger.foreign or scaling not in boundary.scalings:
            say_foreign(scaling)
        scaling.ledger.set_foreign(True)
        boundary.link(scaling)
    boundary.count()
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
    """Looks at every gradient that the step is about to read; links the models."""
    params, optimizer = boundary.params, boundary.optimizer
    guarded = guards_of(optimizer, params)
    for scaling in guarded:
        # No GradScaler makes this step (see `leaves_to_scaler`): autoamp scales.
        scaling.ledger.set_foreign(False)
        boundary.link(scaling)
    runs = BACKWARDS.through(boundary.scalings, boundary.last_read)
    boundary.last_read = BACKWARDS.last
    reached = {run.scaling for run in runs}
    # Models whose gradients reach these weights, unless they have been converted anew.
    others = [s for s in boundary.scalings if s not in guarded and is_guarded(s)]
    guarded += [s for s in others if s in reached or s.models]
    # A model that the backward has not reached has no part in a skipped step.
    models = [s for s in guarded if not (reached and s.enabled) or s in reached]
    team = team_of(judged(boundary.scalings), params)
    looks = bool(guarded) and not cannot_read(optimizer)
    grads = [p.grad for p in params if p.grad is not None] if looks else []
    flag = not_finite(grads) if grads else compat.clear_flag()
    return Reading(params, models, runs, team, looks or bool(team.groups), flag)


def not_finite(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """One fp32 element, 1 where any of `grads` (at least one) is not finite."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    # One kernel takes the tensors of one device.
    flags = [compat.any_not_finite(each) for each in by_device.values()]
    if len(flags) == 1:
        return flags[0]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).amax(0)


# -- agree -----------------------------------------------------------------------------
#
# Ranks step together or not at all.  Where DistributedDataParallel reduces every
# gradient, all ranks read the same gradients, and decide alike.  Of sharded weights, of
# a pipeline's stages, and of weights that no DistributedDataParallel reduces, each rank
# reads its own: there one flag is exchanged.  A rank that skips a collective hangs all
# others.  So a rank takes part because of the weights that its optimizer holds, never
# because of what the rank's own graphs did in the step: a rank's model may have run no
# graph at all.


def agree(boundary: OptimizerBoundary, reading: Reading) -> Reading:
    """The reading that holds on all ranks.

    Raises:
        RankError: a rank has left; or, at the first step, a rank does not answer, or
            has converted its models otherwise.
    """
    team, flag = reading.team, reading.flag
    if not team.groups:
        return reading
    shake_hands(boundary.optimizer, team, judged(boundary.scalings), reading.params)
    if team.exchanging:
        flag = flag.to(team.device, torch.float32, copy=True)
        try:
            for group in team.exchanging:
                # With MAX one rank's flag is every rank's flag.
                most = torch.distributed.ReduceOp.MAX
                torch.distributed.all_reduce(flag, most, group)
        except RuntimeError as error:
            raise RankError(
                "a rank does not take part in the agreement whether to make this "
                f"optimizer step: {str(error).partition(chr(10))[0]}. It has died or "
                "raised, or it steps another optimizer: see what each rank said last, "
                "and start all ranks again"
            ) from error
    team.recover(flag)
    return reading._replace(flag=flag)


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
    looks = False
    # The host reads the found_inf that the kernel reads at times only.  CUDA refuses to
    # wait for a stream that is being captured.
    if not compat.is_capturing(boundary.params[0].device):
        watching = any(s.skip_watch.watching for s in concerned(boundary, reading))
        looks = watching or (boundary.steps + 1) % _ASK_EVERY == 0
    return Way.BY_KERNEL, bool(flag) if looks else None


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
        state = optimizer.state.get(p)
        # A momentum buffer of None is one that no step has filled.
        if p.grad is not None and (
            not state or any(value is None for value in state.values())
        ):
            return False
    return True


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


def concerned(boundary: OptimizerBoundary, reading: Reading) -> list[ModelScaling]:
    """The models that a step is about, each once.

    A backward may have gone through models whose weights another optimizer steps: the
    critic of a generator.
    """
    reached = (run.scaling for run in reading.runs)
    return [*dict.fromkeys([*reading.models, *boundary.scalings, *reached])]


def move(
    boundary: OptimizerBoundary, reading: Reading, way: Way, overflow: bool | None
) -> None:
    """Moves counters for a step, and marks the step on the optimizer.

    A step that the kernel decides is marked after it (see `_given_flag`), but for the
    wrappers of the optimizer.

    Raises:
        LossScaleError: gradients overflow at the lowest loss scale allowed.
    """
    boundary.log(way.value)
    settle_buffers(boundary, reading, overflow)
    if reading.known:
        count_skipped(reading.models, reading.flag)
        note_overflow(boundary, reading, overflow)
    if way is not Way.BY_KERNEL:
        mark(boundary, way is Way.SKIP)
        return
    boundary.steps += 1
    boundary.count()
    boundary.find_wrappers()
    if boundary.wrappers:
        boundary.show_on_wrappers(reading.flag.reshape(()) != 0)


def settle_buffers(
    boundary: OptimizerBoundary, reading: Reading, overflow: bool | None
) -> None:
    """Undoes the writes of forwards to buffers where their step is skipped."""
    if not HOLDING:
        return
    for scaling in concerned(boundary, reading):
        buffers = scaling.ledger.buffers
        if overflow is False:
            buffers.forget()
        else:
            # Where only the device knows, it chooses between buffer and copy itself.
            buffers.put_back(reading.flag if overflow is None else None)


def note_overflow(
    boundary: OptimizerBoundary, reading: Reading, overflow: bool | None
) -> None:
    """Says why a step is skipped, or ends the watch after earlier skipped steps.

    Raises:
        LossScaleError: gradients overflow at the lowest loss scale allowed.
    """
    every, by = concerned(boundary, reading), id(boundary.optimizer)
    if overflow is False:
        # Another optimizer's model may have overflowed in the same backward.
        others = [r for r in reading.runs if r.scaling not in boundary.scalings]
        # A flag is read, for which the host may wait, only where a watch needs it.
        watched = [run for run in others if run.scaling.skip_watch.watching]
        bad = {run.scaling for run in watched if run.overflowed}
        note_step([scaling for scaling in every if scaling not in bad], by)
    elif overflow:
        runs = [run for run in reading.runs if run.overflowed]
        try:
            note_skip(runs, reading.params, reading.models, by)
        # The step is not taken: a script that catches the error finds it skipped.
        except LossScaleError:
            mark(boundary, True)
            raise


def count_skipped(scalings: Sequence[ModelScaling], flag: torch.Tensor) -> None:
    """Counts a step as skipped on the loss scales of models, where `flag` is set."""
    if free_to_read(flag) and not bool(flag):
        return
    for scale in {id(s.own_scale): s.own_scale for s in scalings}.values():
        scale.count_skipped(flag)


def mark(boundary: OptimizerBoundary, skipped: bool) -> None:
    """Counts a step; the optimizer shows whether the step was skipped."""
    boundary.steps += 1
    boundary.show(skipped)
    if skipped:
        # `LRScheduler.step` warns "call optimizer.step() before lr_scheduler.step()" if
        # the step that it has wrapped was never reached.
        compat.mark_stepped(boundary.optimizer)
    boundary.count()
