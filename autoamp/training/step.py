"""An optimizer's step, taken only where the gradients hold no overflow."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from autoamp import compat
from autoamp.errors import LossScaleError
from autoamp.training.guard import cannot_read, guards_of
from autoamp.training.kernel_flag import given_flag, takes_flag
from autoamp.training.ledger.backwards import BACKWARDS
from autoamp.training.ledger.evidence import Evidence, found_inf, gather
from autoamp.training.ledger.graph_run import GraphRun
from autoamp.training.masters import Masters
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.optimizers import Decision, evaluated, params_of
from autoamp.training.rank_handshake import shake_hands
from autoamp.training.ranks import Sizes, agree, judged, team_of
from autoamp.training.scale import LossScale
from autoamp.training.scale_update import largest_in, sizes_in, update_scales
from autoamp.training.skips import count_skips, note_skip, note_step, say_foreign

Step = Callable[..., Any]

_ASK_EVERY = 100
"""After so many steps a flag that only a kernel reads is read here too, with a wait."""

BOUNDARIES: weakref.WeakSet[OptimizerBoundary] = weakref.WeakSet()
"""The boundaries of all optimizers that have one."""


class OptimizerBoundary:
    """Stands between an optimizer and the gradients that the optimizer is given.

    Attributes:
        optimizer: the user's own; only its instance attribute `step` is ours.
        previous: the instance's own `step` before, a scheduler's wrapper say, or None.
        bound: the `step` that the boundary put on the instance; None before.
        hooks: the hooks that save and load our entries with the optimizer's state.
        off: whether the boundary was taken away, but other code has wrapped its `step`.
        scalings: the scaling of each model that the optimizer was seen to step.
        pending: saved loss scales of models that the optimizer has yet to meet.
        last_read: number of the last run whose flags were read.
        steps: how often `step` was called.
        masters: the masters of the optimizer's half-precision parameters; None where
            `convert` was not given the optimizer with a model of such parameters.
        writes_first: whether the step may write before it evaluates its closure.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.previous: Step | None = optimizer.__dict__.get("step")
        self.bound: types.MethodType | None = None
        self.hooks: list[RemovableHandle] = []
        self.off = False
        self.scalings: list[ModelScaling] = []
        self.pending: list[Any] = []
        self.last_read = -1
        self.steps = 0
        self.masters: Masters | None = None
        self.writes_first = True
        self._outer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._skipped_before = False
        self._passed: list[GraphRun] = []
        self._passed_sizes: list[Sizes] = []
        self._unsure: Sequence[GraphRun] = ()

    @property
    def params(self) -> list[torch.Tensor]:
        """The tensors optimized now, by all parts of a ZeroRedundancyOptimizer."""
        return params_of(self._outer() or self.optimizer)

    def note_outer(self, outer: torch.optim.Optimizer) -> None:
        """Notes the optimizer that wraps this one."""
        if outer is not self.optimizer:
            self._outer = weakref.ref(outer)

    @property
    def weights(self) -> list[torch.Tensor]:
        """All that a step writes to besides state: parameters and their masters."""
        masters = self.masters.of.values() if self.masters is not None else ()
        return [*self.params, *masters]

    @property
    def scale_of_each(self) -> list[LossScale]:
        """The loss scale of each of the optimizer's models; several may share one."""
        return [s.domain.loss_scale for s in self.scalings if s.enabled]

    @property
    def loss_scales(self) -> list[LossScale]:
        """The loss scales of the optimizer's models, each once."""
        return list({id(s): s for s in self.scale_of_each}.values())

    def step(self, inner: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `inner(*args, **kwargs)`, the step as it was, or skips the step.

        A skipped step changes no weight and no state, fires no hook, and gives the
        closure's loss or None.

        Raises:
            LossScaleError: gradients overflow at the lowest loss scale allowed.
        """
        decision = self._decide(args, kwargs)
        if decision.skip:
            return decision.loss
        if decision.flag is not None:
            return self._step_with_flag(decision, inner)
        return inner(*decision.args, **decision.kwargs)

    # Where the user compiles the step, the compiler is to leave this method alone.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
        if self.leaves_to_scaler():
            optimizer: Any = self.optimizer
            found = getattr(optimizer, "found_inf", None)
            optimizer.step_was_skipped = found is not None and found.reshape(()) != 0
            return Decision(args, kwargs)
        loss, args, kwargs = evaluated(args, kwargs)
        flag = self.judge()
        if takes_flag(self.optimizer, flag):
            return Decision(args, kwargs, flag=flag)
        skip = bool(flag)
        self.mark(skip)
        return Decision(args, kwargs, loss, skip)

    def judge(self, retries: bool = False) -> torch.Tensor:
        """Reads the flags of the backwards since the last call, moves the loss scale.

        The result is one fp32 element, 1 where the step must not be taken.

        Args:
            retries: whether the caller evaluates again instead of skipping: then only
                an overflow moves the scale, and it counts as no skipped step.
        """
        params = self.params
        evidence = self._read(params)
        doubt = self._in_doubt(params)
        guards = guards_of(self.optimizer, params)
        for scaling in guards:
            if not scaling.enabled:
                self.link(scaling)
        low = any(s.ledger.runs_low for s in guards)
        guarded = low and not cannot_read(self.optimizer)
        scalings = judged([*self.scalings, *evidence.scalings])
        team = team_of(scalings, params)
        shake_hands(self.optimizer, team, scalings, params)
        known = evidence.runs or evidence.elsewhere or doubt or team.groups
        if not (known or guarded):
            return torch.zeros(1)
        for scaling in evidence.scalings:
            scaling.ledger.set_foreign(False)
            self.link(scaling)
        flag = found_inf(evidence, params, team, doubt, guarded)
        sizes = sizes_in(evidence.runs)
        flag, sizes = agree(team, flag, self.loss_scales, sizes)
        team.recover(flag)
        by_kernel = not retries and takes_flag(self.optimizer, flag)
        if by_kernel:
            self._unsure = evidence.live or self._unsure
        waits = not by_kernel or self._is_due(evidence)  # for the device's answer
        if waits and bool(flag):
            self._note_skip(evidence, params, guards)
        elif waits:
            note_step([*evidence.scalings, *guards])
            if retries:
                self._passed += evidence.runs
                self._passed_sizes.append(sizes)
                return flag
        update_scales(evidence.runs, flag, sizes, retries)
        if not retries:
            count_skips(guards, flag)
        return flag

    def leaves_to_scaler(self) -> bool:
        """Whether a GradScaler makes this step, and scales, or the boundary is off."""
        if self.off:
            return True
        if not compat.stepped_by_grad_scaler(self.optimizer):
            return False
        for scaling in self._read(self.params).scalings:
            if not scaling.ledger.foreign or scaling not in self.scalings:
                say_foreign(scaling)
            scaling.ledger.set_foreign(True)
            self.link(scaling)
        return True

    def link(self, scaling: ModelScaling) -> None:
        """Notes that the optimizer steps weights of a model."""
        scaling.ledger.stepped = True
        if scaling not in self.scalings:
            if self.pending and scaling.enabled:
                self._take([scaling.domain.loss_scale], self.pending)
            self.scalings.append(scaling)

    def take_over(self, saved: list[Any]) -> None:
        """Loads saved loss scales into the models' own, in order, as models are met.

        Raises:
            LossScaleError: a saved scale does not fit; nothing is changed.
        """
        self._take(self.scale_of_each, saved)

    def _take(self, scales: list[LossScale], saved: list[Any]) -> None:
        for scale, state in zip(scales, saved, strict=False):
            scale.check(state)
        for scale, state in zip(scales, saved, strict=False):
            scale.load_state_dict(state)
        self.pending = saved[len(scales) :]

    # -- in judgement --------------------------------------------------------------

    def _in_doubt(self, params: list[torch.Tensor]) -> bool:
        """Whether gradients of a skipped step may still be there, and new ones on top.

        Where only a kernel has read the flag, the last step may have been skipped; but
        the gradients of that step are gone where the next backward found no gradients.
        """
        if self._skipped_before or not self._unsure:
            return self._skipped_before
        ids = {id(p) for p in params}
        return any(run.lives_in(ids) for run in self._unsure)

    def _is_due(self, evidence: Evidence) -> bool:
        """Whether a flag that the kernel reads is read here too."""
        if compat.is_capturing(self.params[0].device):
            return False
        watching = any(s.skip_watch.watching for s in evidence.scalings)
        return watching or (self.steps + 1) % _ASK_EVERY == 0

    def _note_skip(
        self,
        evidence: Evidence,
        params: list[torch.Tensor],
        guards: Sequence[ModelScaling],
    ) -> None:
        try:
            note_skip(evidence, params, self.steps, guards)
        except LossScaleError:
            self.mark(True)
            raise

    def _read(self, params: list[torch.Tensor]) -> Evidence:
        """The evidence since the last step; forgets runs read by all boundaries."""
        evidence = gather(params, self.last_read, self.scalings)
        self.last_read = evidence.last
        BACKWARDS.forget(min((b.last_read for b in list(BOUNDARIES)), default=-1))
        return evidence

    def finish(self, skipped: bool = False) -> None:
        """Ends a step judged with `retries`: the step counts once, not once per try."""
        flag = torch.full((1,), float(skipped))
        if not skipped:
            sizes = largest_in(self._passed_sizes)
            update_scales(self._passed, flag, sizes, retries=True)
        for scale in self.loss_scales:
            scale.count_skipped(flag)
        count_skips(self.scalings, flag)
        self._passed, self._passed_sizes = [], []
        self.mark(skipped)

    # -- stepping ------------------------------------------------------------------

    def mark(self, skipped: bool) -> None:
        """Ends a step: tells the optimizer's owner whether the step was skipped."""
        self.steps += 1
        optimizer: Any = self.optimizer
        optimizer.step_was_skipped = skipped
        self._skipped_before, self._unsure = skipped, ()
        if skipped:
            compat.mark_stepped(optimizer)

    def _step_with_flag(self, decision: Decision, inner: Step) -> Any:
        flag = decision.flag
        assert flag is not None
        self._skipped_before = False  # not known here: see `_in_doubt`
        try:
            with given_flag(self.optimizer, flag):
                return inner(*decision.args, **decision.kwargs)
        finally:
            self.steps += 1
            optimizer: Any = self.optimizer
            optimizer.step_was_skipped = flag.reshape(()) != 0
