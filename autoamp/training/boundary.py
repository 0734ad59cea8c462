"""The boundary of an optimizer: its counters, its saved state and its wrappers."""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from autoamp import compat
from autoamp.errors import CheckpointError
from autoamp.training import saved_masters
from autoamp.training.masters import KEY_CARRIED, Masters
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.options import Options
from autoamp.training.scale import (
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
)
from autoamp_said import logger_of

logger = logger_of(__name__)

Step = Callable[..., Any]

BOUNDARIES: weakref.WeakSet[OptimizerBoundary] = weakref.WeakSet()
"""The boundaries of all optimizers that have one."""

KEY = "autoamp"
"""The entry of the first saved parameter group that holds the loss scales."""

_FIELDS = {"loss_scales"}

_DEEPEST = 24
"""How many frames are searched for the wrappers' steps."""

_TRAINERS = {
    "torch",
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
}
"""Packages whose wrappers of optimizers compute nothing with the weights."""

_MARK, _BEHIND = "step_was_skipped", "_is_overflow"
"""The mark of a skipped step, and the attribute that accelerate's property reads."""


def boundaries() -> list[OptimizerBoundary]:
    """The boundaries of all optimizers that are alive and have one."""
    return [each for each in list(BOUNDARIES) if each.alive]


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that finally steps, inside accelerate's or Lightning's wrappers."""
    seen = {id(optimizer)}
    while True:
        held = [vars(optimizer).get(n) for n in ("optimizer", "_optimizer", "optim")]
        inner = [each for each in held if isinstance(each, Optimizer)]
        if not inner or id(inner[0]) in seen:
            return optimizer
        optimizer = inner[0]
        seen.add(id(optimizer))


def passes_on(optimizer: Optimizer) -> bool:
    """Whether an optimizer is a trainer's wrapper, which computes nothing itself."""
    return type(optimizer).__module__.partition(".")[0] in _TRAINERS


def computing_round(optimizer: Optimizer) -> Any:
    """The optimizer that computes with the weights of `optimizer`, and steps it now.

    Its step, or another method of it, is on Python's stack, or is about to run.  Its
    class may be no `Optimizer` of torch's.
    """
    inner = innermost(optimizer)
    if inner is not optimizer and not passes_on(optimizer):
        return optimizer
    ids = {id(p) for p in params_of(optimizer)}
    for _, owner in compat.callers(_DEEPEST):
        if owner is optimizer or owner is inner or not hasattr(type(owner), "step"):
            continue
        groups = getattr(owner, "param_groups", None)
        if not isinstance(groups, list):
            continue
        if not passes_on(owner) and not ids.isdisjoint(map(id, params_of(owner))):
            return owner
    return None


def params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors `optimizer` optimizes now: groups may be added at any time."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def closure_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step, or None."""
    closure: Callable[[], Any] | None = args[0] if args else kwargs.get("closure")
    return closure


class OptimizerBoundary:
    """Everything that is kept for one optimizer whose steps may be skipped.

    Attributes:
        optimizer: the user's own; only its instance attribute `step` is ours.  Nothing
            of ours keeps an optimizer alive.
        previous: the instance's own `step` before, a scheduler's wrapper say, or None.
        wanted: the options under which weights that become half-precision ones get
            masters; None where they get none.
        bound: the `step` that the boundary put on the instance; None before.
        hooks: the hooks that save and load our entries with the optimizer's state.
        off: whether the boundary was taken away, but other code has wrapped its `step`.
        scalings: the scaling of each model that the optimizer was seen to step.
        pending: saved loss scales of models that the optimizer has yet to meet.
        masters: the masters of the optimizer's half-precision parameters; None where
            there are none.
        last_read: number of the last run that the last step was told of.
        steps: how often `step` was called.
        inside: whether the optimizer's own step runs, and has been judged.
        writes_first: whether the step may write before it evaluates its closure.
        wrappers: the optimizers round this one that show whether a step was skipped.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.previous: Step | None = optimizer.__dict__.get("step")
        self.bound: Step | None = None
        self.wanted: Options | None = None
        self.hooks: list[RemovableHandle] = []
        self.off = False
        self.scalings: list[ModelScaling] = []
        self.pending: list[Any] = []
        self.masters: Masters | None = None
        self.last_read = -1
        self.steps = 0
        self.inside = False
        self.writes_first = True
        self.wrappers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._outer: Callable[[], Optimizer | None] = lambda: None

    @property
    def alive(self) -> bool:
        """Whether the optimizer is alive; other code may hold its boundary longer."""
        return self._optimizer() is not None

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "only an optimizer that is alive takes steps"
        return optimizer

    @property
    def params(self) -> list[torch.Tensor]:
        """The tensors optimized now, by all parts of a ZeroRedundancyOptimizer."""
        optimizer = self._outer() or self._optimizer()
        return [] if optimizer is None else params_of(optimizer)

    @property
    def outer(self) -> Optimizer | None:
        """The optimizer round this one that computes with the weights, or None."""
        outer = self._outer()
        return None if outer is None or passes_on(outer) else outer

    def note_outer(self, outer: Optimizer) -> None:
        """Notes the optimizer that wraps this one."""
        if outer is not self.optimizer:
            self._outer = weakref.ref(outer)

    @property
    def scaled(self) -> list[ModelScaling]:
        """The optimizer's models that have a loss scale."""
        return [scaling for scaling in self.scalings if scaling.enabled]

    def link(self, scaling: ModelScaling) -> None:
        """Notes that the optimizer steps weights of a model."""
        scaling.ledger.stepped = True
        if scaling not in self.scalings:
            if self.pending and scaling.enabled:
                self._load([scaling], self.pending)
            self.scalings.append(scaling)

    def count(self) -> None:
        """Counts a step for each model."""
        for scaling in self.scalings:
            scaling.ledger.steps += 1

    def log(self, reason: str) -> None:
        """Logs what was decided about a step, for debugging."""
        name = type(self.optimizer).__name__
        logger.debug("autoamp: step %d of %s: %s", self.steps, name, reason)

    # -- saved state -----------------------------------------------------------------
    #
    # The scales travel as one more entry of the first parameter group, because such an
    # entry survives in an optimizer that has no boundary: an optimizer whose state is
    # loaded before its first step, and a plain one, in a run without autoamp, which
    # carries the entry along unread.

    def carry(self) -> None:
        """Makes the optimizer's saved state carry loss scales and masters."""
        optimizer = self.optimizer
        loaded: list[list[Any]] = []
        whole: list[dict[str, Any]] = []

        def save(_: Optimizer, state: dict[str, Any]) -> None:
            scales = [s.own_scale.state_dict() for s in self.scaled] + self.pending
            if scales and state["param_groups"]:
                state["param_groups"][0][KEY] = {"loss_scales": scales}
            if self.masters is not None:
                saved_masters.save(self.masters, state)

        def before_load(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            loaded.clear()
            whole[:] = [state]
            if self.masters is not None:
                saved_masters.check(self.masters, state)
            # The groups are copied, because the entry is taken out, and the user may
            # load the same dictionary again.
            groups = [dict(group) for group in state["param_groups"]]
            if groups and KEY in groups[0]:
                scales = _checked(groups[0].pop(KEY))
                # Everything is checked before torch changes anything: a state that does
                # not fit changes nothing.
                _check(self.scaled, scales)
                loaded.append(scales)
            if groups and self.masters is not None:
                groups[0].pop(KEY_CARRIED, None)
            rest = saved_masters.without_masters(state)
            return {**state, "param_groups": groups, "state": rest}

        def after_load(_: Optimizer) -> None:
            for scales in loaded:
                self._load(self.scaled, scales)
            if self.masters is not None:
                # Masters take the state as it was given: torch has cast its own copy of
                # it to the parameters' half dtype.
                saved_masters.load(self.masters, whole[0])
            loaded.clear()
            whole.clear()

        # A copy or a pickle of an optimizer is made of its groups and state alone.
        optimizer.__dict__["__reduce_ex__"] = _reduce(self, optimizer)
        self.hooks = [
            optimizer.register_state_dict_post_hook(save),
            optimizer.register_load_state_dict_pre_hook(before_load),
            optimizer.register_load_state_dict_post_hook(after_load),
        ]
        # The state may have been loaded before the optimizer was met.
        for group in optimizer.param_groups[:1]:
            if KEY in group:
                self._load(self.scaled, _checked(group.pop(KEY)))

    def _load(self, scalings: list[ModelScaling], saved: list[Any]) -> None:
        """Loads saved loss scales, in order; the rest is for models met later.

        This run's own settings stay, and a warning tells of those of a checkpoint that
        are others.

        Raises:
            LossScaleError: a saved scale does not fit; nothing is changed.
        """
        _check(scalings, saved)
        for scaling, state in zip(scalings, saved, strict=False):
            why = scaling.own_scale.resume(state, asked=scaling.asked)
            if why:
                logger.warning(
                    "autoamp: %s: the loss scale of the checkpoint is not taken over "
                    "as it is: %s. Training goes on with %r at %g",
                    scaling.label,
                    why,
                    scaling.own_scale,
                    scaling.own_scale.scale,
                )
        self.pending = saved[len(scalings) :]

    # -- wrappers --------------------------------------------------------------------
    #
    # accelerate's scheduler, and the Trainer of transformers, ask accelerate's wrapper
    # of an optimizer whether the last step was skipped.  That wrapper knows of skipped
    # steps only where it has a GradScaler.  The optimizer inside does not know its
    # wrapper, so a wrapper is found on Python's stack: it is the one whose `step` is
    # stepping the optimizer.

    def show(self, skipped: Any) -> None:
        """Sets `step_was_skipped` on the optimizer, and on the wrappers that have it.

        Args:
            skipped: whether the step was skipped; a tensor where only the device knows.
        """
        optimizer: Any = self.optimizer
        optimizer.step_was_skipped = skipped
        self.find_wrappers()
        self.show_on_wrappers(skipped)

    def find_wrappers(self) -> None:
        """Notes the wrappers that step the optimizer now, and have a mark to set."""
        # A wrapper holds its optimizer, and not the other way round: the stack has the
        # wrappers in whose `step` the optimizer is being stepped.
        frame: types.FrameType | None = sys._getframe(1)
        for _ in range(_DEEPEST):
            if frame is None:
                return
            code = frame.f_code
            if code.co_name == "step" and code.co_argcount:
                owner = compat.first_argument(frame)
                # A GradScaler that accelerate's wrapper steps by ends the search too:
                # the wrapper notes what it did.
                known = isinstance(owner, Optimizer)
                if not known or innermost(owner) is not self.optimizer:
                    return
                if owner is not self.optimizer and (
                    _is_behind(owner) or _MARK in vars(owner)
                ):
                    self.wrappers.add(owner)
            frame = frame.f_back

    def show_on_wrappers(self, skipped: Any) -> None:
        """Sets the mark on the wrappers that were seen to step the optimizer."""
        for wrapper in self.wrappers:
            vars(wrapper)[_BEHIND if _is_behind(wrapper) else _MARK] = skipped


def _reduce(boundary: OptimizerBoundary, optimizer: Optimizer) -> Callable[..., Any]:
    """A `__reduce_ex__` for an optimizer's `__dict__`: its masters are copied too."""
    this, of = weakref.ref(boundary), weakref.ref(optimizer)

    def reduce(protocol: Any) -> Any:
        known, found = this(), of()
        if known is not None and known.masters is not None:
            return saved_masters.reduced(known.masters, protocol)
        kind: Any = type(found)
        return kind.__reduce_ex__(found, protocol)

    return reduce


def _is_behind(wrapper: Optimizer) -> bool:
    """Whether the mark is a property that reads an attribute, as accelerate's is."""
    mark = inspect.getattr_static(type(wrapper), _MARK, None)
    return isinstance(mark, property) and _BEHIND in vars(wrapper)


def _check(scalings: Sequence[ModelScaling], saved: Sequence[Any]) -> None:
    """Raises LossScaleError where one of the loss scales `saved` cannot be used."""
    for scaling, state in zip(scalings, saved, strict=False):
        if scaling.own_scale.is_like(state):
            scaling.own_scale.check(state)


def check_loaded(optimizer: Optimizer) -> None:
    """Raises where `carry` could not use the state that the optimizer was loaded with.

    Raises:
        AutoampError: as for `load_state_dict`.
    """
    for group in optimizer.param_groups[:1]:
        if KEY in group:
            _checked(group[KEY])


def _checked(saved: Any) -> list[Any]:
    """The saved loss scales, each of which is known to be usable."""
    fields = set(saved) if isinstance(saved, dict) else set()
    if fields != _FIELDS or not isinstance(saved["loss_scales"], list):
        raise CheckpointError(
            f"the {KEY!r} entry of the saved optimizer state holds "
            f"{sorted(map(str, fields)) or type(saved).__name__}, not a list "
            "'loss_scales'; it was made by another version, or damaged. Remove "
            f"state['param_groups'][0][{KEY!r}] to begin with a new loss scale"
        )
    dynamic = DynamicLossScale()
    others: dict[str, LossScale] = {
        type(s).__name__: s for s in (StaticLossScale(1.0), NoLossScale())
    }
    scales = list(saved["loss_scales"])
    for scale in scales:
        kind = scale.get("kind") if isinstance(scale, dict) else None
        others.get(str(kind), dynamic).check(scale)
    return scales
