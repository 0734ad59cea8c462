"""Loss scales: the factor on the gradients inside a graph, and how the factor moves.

The state is kept in 0-dim tensors and moved by tensor arithmetic, so that a step whose
overflow is known only on the GPU need not wait for the GPU.  These tensors are replaced
and never written to, because graphs that have yet to run backward hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, Literal, get_args

import torch

from autoamp import compat
from autoamp.dtypes import NARROWEST, largest, needs_loss_scale
from autoamp.errors import LossScaleError

INIT_SCALE = 2.0**15
"""2**15, half of GradScaler's 2**16, is the largest power of two below fp16's largest
number: so the gradient of a loss to itself, 1, does not overflow on the first step."""

MIN_SCALE = 2.0**-14
"""The smallest normal number of fp16.  A gradient that overflows even at this scale is
larger than 10**9, and the loss, or something before it, is at fault.  (The floor is not
1, as in DeepSpeed: where a script scales its loss by hand, our scale goes below 1.)"""

LossScaleName = Literal["auto", "dynamic", "off"]

LOSS_SCALES: tuple[str, ...] = get_args(LossScaleName)
"""Names of loss scales; a number or a `LossScale` may be given as well."""

LOOKS = 5
"""Steps in which a scale that climbs is told how large the gradients are."""

LATER = 200
"""Steps between two looks of a scale that has climbed: gradients shrink in training."""

_MOST = 12
"""Most doublings in one look: gradients that a small scale has rounded to 0 are seen at
the next look."""

_ROOM = 2.0**13
"""How many times larger than the largest seen a gradient may be after a look.  Losses
jump; and of the 40 powers of two that fp16 has, 27 are left for smaller gradients."""

_HIGHEST = 2.0**126
"""The inverse of a higher scale is no normal number of fp32."""

_LEFT, _SEEN = "looks_left", "largest_gradient"
_UNTIL, _LENT = "steps_until_look", "doublings_lent"
_CLIMB_FIELDS = frozenset({_LEFT, _SEEN, _UNTIL, _LENT})
"""The additional fields in the state of a scale that climbs."""

_FP32 = torch.finfo(torch.float32)
_LONGEST = torch.iinfo(torch.int32).max


class LossScale:
    """Base class of the loss scales that `convert(loss_scale=...)` takes.

    A scale belongs to one run of training, because its state moves.  Several models
    that are given one scale share it.
    """

    _config: tuple[str, ...] = ()

    def __init__(self, scale: float) -> None:
        self._scale = scalar(scale)
        self._skipped = scalar(0, torch.int64)
        self._given: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    # -- for a graph and an optimizer step -----------------------------------------

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and its inverse, 0-dim fp32 tensors on `device`.

        The two tensors are never written to, so that a later backward finds the values
        that its forward was given.
        """
        if device not in self._given:
            scale = self._scale.to(device, non_blocking=True)
            # The reciprocal as GradScaler takes it: in fp64, then rounded.
            self._given[device] = scale, scale.double().reciprocal().float()
        return self._given[device]

    def update(
        self,
        found_inf: torch.Tensor,
        used: torch.Tensor | None = None,
        *,
        counts: bool = True,
    ) -> None:
        """Moves the scale when a backward has ended.

        Args:
            found_inf: one fp32 element, 0 or 1, on any device; nothing waits for it.
            used: the scale of the backward, 0-dim; None for the scale in force.
            counts: whether the backward counts towards growth.
        """

    def count_skipped(self, found_inf: torch.Tensor) -> None:
        """Counts a step as skipped where `found_inf` (one element) is not 0."""
        skipped = (found_inf.reshape(()) != 0).long()
        self._skipped = self._skipped.to(skipped.device) + skipped

    @property
    def wants_size(self) -> bool:
        """Whether `note_size` is to follow the next `update`; asked before that."""
        return False

    def note_size(
        self, largest: torch.Tensor | None, found_inf: bool | torch.Tensor
    ) -> None:
        """Moves the scale by how large gradients are.

        Args:
            largest: the largest fp16 gradient of a step, at its true value, 0-dim fp32;
                None where it is not known.
            found_inf: the flag that `update` was given; a bool where its value is known
                on the host.
        """

    @property
    def is_stuck(self) -> bool:
        """Whether the last backward overflowed at the lowest scale; waits for it."""
        return False

    @property
    def overflowed_at(self) -> float:
        """The scale of the last backward that overflowed; waits for the device."""
        return self.scale

    @property
    def current(self) -> torch.Tensor:
        """The scale in force, 0-dim, on any device."""
        return self._scale

    # -- for a person to read ------------------------------------------------------

    @property
    def scale(self) -> float:
        """The scale in force; waits for the device."""
        return float(self._scale)

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped for an overflow so far; waits for the device."""
        return int(self._skipped)

    @property
    def growth_tracker(self) -> int:
        """Steps without overflow since the scale last moved; waits for the device."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Every field, as plain Python numbers."""
        state: dict[str, Any] = {"kind": type(self).__name__, "scale": self.scale}
        state |= {name: getattr(self, name) for name in self._config}
        return state | {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over every field of a state that `state_dict` gave.

        Raises:
            LossScaleError: a field is missing, unknown or unusable; nothing is changed.
        """
        self.check(state)
        self._scale = scalar(state["scale"])
        self._skipped = scalar(state["skipped_steps"], torch.int64)
        self._given.clear()

    def resume(self, state: Mapping[str, Any], *, asked: bool) -> str:  # noqa: ARG002
        """Takes over a saved state as far as this run asks for nothing else.

        Args:
            asked: whether the user has asked for this very scale.

        Returns:
            A clause on what was not taken over; "" where all was.

        Raises:
            LossScaleError: as for `load_state_dict`; nothing is changed.
        """
        if not self.is_like(state):
            return f"it is a {state['kind']}, and this run uses a {type(self).__name__}"
        self.load_state_dict(state)
        return ""

    def is_like(self, state: Any) -> bool:
        """Whether a state is of a scale of this kind, as far as it says."""
        kind = type(self).__name__
        return not isinstance(state, Mapping) or state.get("kind", kind) == kind

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises LossScaleError where `load_state_dict(state)` would."""
        if not isinstance(state, Mapping):
            raise LossScaleError(
                f"the state of a loss scale is a dictionary, not {type(state).__name__}"
            )
        kind = type(self).__name__
        if "kind" in state and state["kind"] != kind:
            raise LossScaleError(
                f"the state was saved by {state['kind']!r}, and this run uses {kind}; "
                "convert with the same loss_scale, or drop the field from the state"
            )
        wanted, got = set(self.state_dict()) - _CLIMB_FIELDS, set(state)
        problems = []
        if wanted - got:
            problems.append(f"missing {', '.join(sorted(wanted - got))}")
        if got - wanted:
            names = map(repr, sorted(got - wanted, key=str))
            problems.append(f"unknown {', '.join(names)}")
        if problems:
            raise LossScaleError(
                f"the saved state of {kind} does not fit: {'; '.join(problems)}"
            )
        _check_positive("scale", state["scale"])
        _check_count("skipped_steps", state["skipped_steps"])

    def __repr__(self) -> str:
        fields = ", ".join(f"{n}={getattr(self, n)!r}" for n in self._config)
        return f"{type(self).__name__}({fields})"


class StaticLossScale(LossScale):
    """A scale that never moves; steps with an overflow are skipped.

    Raises:
        LossScaleError: `scale` is not a positive finite number.
    """

    def __init__(self, scale: float) -> None:
        _check_positive("loss_scale", scale)
        super().__init__(scale)

    def resume(self, state: Mapping[str, Any], *, asked: bool) -> str:
        """Takes over a saved state, but not its scale; see the base class."""
        own = self.scale
        why = super().resume(state, asked=asked)
        saved, self._scale = self.scale, scalar(own)
        if why or saved == own:
            return why
        return f"it is {saved:g}, and this run asks for {own:g}"

    def __repr__(self) -> str:
        return f"StaticLossScale({self.scale!r})"


class NoLossScale(LossScale):
    """No scaling and no flags in graphs, as for bf16.

    Steps are still skipped by the guard, for gradients that are not finite.
    """

    def __init__(self) -> None:
        super().__init__(1.0)


class DynamicLossScale(LossScale):
    """A scale that grows while nothing overflows and backs off when something does.

    As in `torch.amp.GradScaler`, the scale is multiplied by `growth_factor` after
    `growth_interval` steps in a row without an overflow (never to infinity), and by
    `backoff_factor` at an overflow; but backwards move it, as they end, and no step
    does.  Of the backwards between two steps the first counts towards growth.

    A scale that climbs also goes by the size of gradients.  From the second step to the
    fifth the scale is doubled as often as leaves room for 2**13 times the largest fp16
    gradient seen so far, and once every 200 steps from then on.  An overflow takes back
    all that the scale has climbed by, and ends the climbing.  Where gradients cannot be
    seen (a compiler's graphs, loops, bf16), the scale moves as any other.

    Args:
        init_scale: the scale to begin with.
        growth_factor, backoff_factor, growth_interval: as above.
        min_scale: the floor.  An overflow at the floor is an error, not a skipped step.
        hysteresis: how many overflows, between two moves, make the scale back off once
            (DeepSpeed's `hysteresis`); the step of each such overflow is skipped.
        climbs: whether the scale climbs.  By default it does where no `init_scale` and
            no `hysteresis` is given: a scale that begins at a given value stays exactly
            there until it grows or backs off.

    Raises:
        LossScaleError: a value is unusable.
    """

    _config = (
        "init_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "min_scale",
        "hysteresis",
    )

    def __init__(  # noqa: PLR0917 (GradScaler's signature)
        self,
        init_scale: float = INIT_SCALE,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = MIN_SCALE,
        hysteresis: int = 1,
        *,
        climbs: bool | None = None,
    ) -> None:
        given = locals()
        self._configure({name: given[name] for name in self._config})
        super().__init__(init_scale)
        self._tracker = scalar(0, torch.int32)
        self._patience = scalar(hysteresis, torch.int32)
        self._no = self._found = self._stuck = scalar(False, torch.bool)
        self._overflowed_at = self._scale
        if climbs is None:
            climbs = init_scale == INIT_SCALE and hysteresis == 1
        self._climb = Climb() if climbs else None

    def _configure(self, values: Mapping[str, Any]) -> None:
        for name in ("init_scale", "min_scale", "growth_factor", "backoff_factor"):
            _check_positive(name, values[name])
        for name in ("growth_interval", "hysteresis"):
            _check_count(name, values[name], least=1)
        growth, backoff = values["growth_factor"], values["backoff_factor"]
        first, least = values["init_scale"], values["min_scale"]
        if not growth > 1:
            raise LossScaleError(f"growth_factor={growth!r} must be above 1")
        if not backoff < 1:
            raise LossScaleError(f"backoff_factor={backoff!r} must be below 1")
        if least > first:
            raise LossScaleError(f"min_scale={least!r} is above init_scale={first!r}")
        self.init_scale, self.min_scale = float(first), float(least)
        self.growth_factor, self.backoff_factor = float(growth), float(backoff)
        self.growth_interval = int(values["growth_interval"])
        self.hysteresis = int(values["hysteresis"])

    def update(
        self,
        found_inf: torch.Tensor,
        used: torch.Tensor | None = None,
        *,
        counts: bool = True,
    ) -> None:
        """Moves the scale when a backward has ended; see the base class."""
        clean = free_to_read(found_inf) and not found_inf
        if self._climb is not None and (counts or not clean):
            self._climb.count_step()
        readable = clean and free_to_read(self._tracker)
        if readable and int(self._tracker) + counts < self.growth_interval:
            # Nothing moves, as in nearly every backward.
            self._tracker = self._tracker + int(counts)
            self._found = self._stuck = self._no
            return
        overflow, device = found_inf.reshape(()), found_inf.device
        before = self._scale.to(device)
        # The kernel writes in place, and graphs that have yet to run backward hold the
        # tensors of now.
        scale, tracker = before.clone(), self._tracker.to(device) - int(not counts)
        if not clean:
            # An overflow tells of the scale that its backward used: two backwards that
            # used one scale lower the scale in force once.
            used = before if used is None else used.to(device)
            kernel_lowers = (before / self.backoff_factor).minimum(used)
            scale = torch.where(overflow != 0, kernel_lowers, before)
            self._found = overflow != 0
            self._stuck = self._found & (used <= self.min_scale)
            self._overflowed_at = torch.where(
                overflow != 0, used, self._overflowed_at.to(device)
            )
        else:
            self._found = self._stuck = self._no
        compat.update_scale(
            scale,
            tracker,
            overflow,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        # Torch's kernel knows no floor: it halves a scale down to 0.
        scale.clamp_(min=self.min_scale)
        if self.hysteresis > 1:
            patience = self._patience.to(device) - overflow.int()
            # An overflow that is borne only starts the count of clean steps anew.
            borne = (overflow != 0) & (patience > 0)
            scale = torch.where(borne, before, scale)
            # The kernel sets the tracker to 0 where the scale has grown or backed off.
            moved = (tracker == 0) & ~borne
            self._patience = torch.where(moved, self.hysteresis, patience)
        if self._climb is not None:
            scale = self._climb.moved(before, scale, overflow, self.backoff_factor)
            scale = scale.clamp(min=self.min_scale)
        self._scale, self._tracker = scale, tracker
        self._given.clear()

    @property
    def wants_size(self) -> bool:
        """Whether the scale is still climbing, or due to see if it may climb again."""
        return self._climb is not None and self._climb.is_due

    def note_size(
        self, largest: torch.Tensor | None, found_inf: bool | torch.Tensor
    ) -> None:
        """Moves the scale by how large gradients are; see the base class."""
        if self._climb is None:
            return
        before = self._scale
        scale = self._climb.scale_after(before, largest, found_inf)
        if scale is not before:
            moved = scale != before.to(scale.device)
            self._tracker = torch.where(moved, 0, self._tracker.to(scale.device))
            self._scale = scale
            self._given.clear()

    @property
    def is_stuck(self) -> bool:
        """Whether the last backward overflowed at `min_scale`; waits for the device."""
        return bool(self._stuck)

    @property
    def overflowed_at(self) -> float:
        """The scale of the last backward that overflowed; waits for the device."""
        return float(self._overflowed_at)

    @property
    def growth_tracker(self) -> int:
        """Steps without overflow since the scale last moved; waits for the device."""
        return int(self._tracker)

    def state_dict(self) -> dict[str, Any]:
        """Every field, as plain Python numbers."""
        state = super().state_dict() | {
            "growth_tracker": self.growth_tracker,
            "hysteresis_left": int(self._patience),
        }
        return state if self._climb is None else state | self._climb.state_dict()

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises LossScaleError where `load_state_dict(state)` would."""
        if isinstance(state, Mapping):
            Climb.check(state)
            state = {k: v for k, v in state.items() if k not in _CLIMB_FIELDS}
        super().check(state)
        DynamicLossScale(**{name: state[name] for name in self._config})
        # A tracker beyond the interval would never meet the interval, so that the scale
        # would never grow again.
        for name, below in (
            ("growth_tracker", state["growth_interval"]),
            ("hysteresis_left", state["hysteresis"] + 1),
        ):
            _check_count(name, state[name])
            if state[name] >= below:
                raise LossScaleError(f"{name}={state[name]!r} is not below {below}")

    def resume(self, state: Mapping[str, Any], *, asked: bool) -> str:
        """Takes over where a saved scale stood; see the base class."""
        own = {name: getattr(self, name) for name in self._config}
        why = super().resume(state, asked=asked)
        others = (
            [n for n in self._config if getattr(self, n) != own[n]] if asked else []
        )
        if why or not others:
            return why
        self._configure(own)
        self._scale = scalar(max(self.scale, self.min_scale))
        left = min(self.growth_tracker, self.growth_interval - 1)
        self._tracker = scalar(left, torch.int32)
        self._patience = scalar(min(int(self._patience), self.hysteresis), torch.int32)
        return f"this run asks for another {' and '.join(others)}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over every field, the constructor's too; see the base class."""
        now = self.scale
        super().load_state_dict(state)
        # A script that goes back to its last checkpoint whenever gradients overflow
        # would find the same overflow each time.
        if bool(self._found):
            self._scale = scalar(min(now, state["scale"]))
        # A state without the fields of a climb was saved by a scale that stays where it
        # is, unless nothing had happened to it and this scale begins there too.
        begun = state["growth_tracker"] or state["skipped_steps"]
        untouched = not begun and state["scale"] == state["init_scale"]
        begins_here = untouched and state["init_scale"] == self.init_scale
        self._configure(state)
        self._tracker = scalar(state["growth_tracker"], torch.int32)
        self._patience = scalar(state["hysteresis_left"], torch.int32)
        if _LEFT in state:
            self._climb = Climb.of(state)
        elif not begins_here:
            self._climb = None
        elif self._climb is not None:
            self._climb = Climb()


class Climb:
    """One scale's looks at its gradients: the first five, and every 200th step later.

    The doublings of looks are lent: an overflow takes them back, and ends all climbing.
    So climbing costs one skipped step at most.

    Attributes:
        left: how many of the first looks are left.
        until: steps until the next look after the first ones.
        largest_seen: the largest fp16 gradient seen, at its true value, halved by each
            later look that sees only smaller ones; infinite after an overflow that came
            after the first looks.
        lent: doublings that looks have made since the last overflow.
    """

    def __init__(self, left: int = LOOKS) -> None:
        self.left = left
        self.until = LATER
        self.largest_seen = scalar(0.0)
        self.lent = scalar(0.0)

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be looked at."""
        return self.left > 0 or not self.until

    def count_step(self) -> None:
        """Counts a step that was taken, or skipped."""
        if not self.left:
            self.until = max(self.until - 1, 0)

    def moved(
        self,
        before: torch.Tensor,
        after: torch.Tensor,
        found_inf: torch.Tensor,
        back_off: float,
    ) -> torch.Tensor:
        """The new scale after a backward that `found_inf` has moved from `before`.

        The result is `after`, save where lent doublings overflowed: then it is no more
        than `after` would be without those doublings.
        """
        if free_to_read(found_inf) and not found_inf:
            return after
        overflow, lent = found_inf != 0, self.lent.to(found_inf.device)
        # With an infinite size `_room` is 0 for good: an overflow of what was lent, or
        # after the first looks, ends all climbing.
        ends = overflow if not self.left else overflow & (lent > 0)
        self.largest_seen = torch.where(
            ends, torch.inf, self.largest_seen.to(overflow.device)
        )
        self.lent = torch.where(overflow, 0, lent)
        lent = torch.where(overflow & (lent > 0), lent, 0)
        # Powers of two are exact in fp32: without the loan the overflow would have
        # moved this very scale.
        alone = torch.ldexp(before.to(overflow.device), -lent)
        return torch.where(lent > 0, after.minimum(alone * back_off), after)

    def scale_after(
        self,
        scale: torch.Tensor,
        largest: torch.Tensor | None,
        found_inf: bool | torch.Tensor,
    ) -> torch.Tensor:
        """The new scale after a look; `scale` itself where nothing was seen.

        Args:
            scale: the scale after the backward.
            largest, found_inf: as for `LossScale.note_size`.
        """
        first, is_early = self.left == LOOKS, self.left > 0
        if not is_early:
            self.until = LATER
        elif found_inf is not True:  # an overflow has shown no size
            self.left -= 1
        if largest is None:
            return scale
        device = largest.device
        overflow = (
            torch.as_tensor(found_inf, dtype=torch.float32, device=device).reshape(())
            != 0
        )
        scale, before = scale.to(device), self.largest_seen.to(device)
        # `largest` may be infinite without a flag, in gradients that were thrown away.
        tells = ~overflow & largest.isfinite() & (largest > 0)
        # Each later look halves what is remembered, so that one old peak is forgotten.
        seen = largest.maximum(before if is_early else before / 2)
        self.largest_seen = torch.where(tells, seen, before)
        # One batch is too little to climb by.
        room = torch.where(tells & (not first), _room(scale, self.largest_seen), 0)
        self.lent = self.lent.to(device) + room
        return torch.ldexp(scale, room)

    def state_dict(self) -> dict[str, Any]:
        """Every field, as plain Python numbers."""
        return {
            _LEFT: self.left,
            _SEEN: float(self.largest_seen),
            _UNTIL: self.until,
            _LENT: int(self.lent),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Climb:
        """The climb that the fields of `state` describe."""
        climb = cls(state[_LEFT])
        climb.until = state[_UNTIL]
        climb.largest_seen = scalar(state[_SEEN])
        climb.lent = scalar(float(state[_LENT]))
        return climb

    @staticmethod
    def check(state: Mapping[str, Any]) -> None:
        """Raises LossScaleError where the fields in `state` are unusable."""
        missing = _CLIMB_FIELDS - set(state)
        if missing == _CLIMB_FIELDS:
            return
        if missing:
            names = ", ".join(sorted(missing))
            raise LossScaleError(f"the state of a scale that climbs is missing {names}")
        for name in (_LEFT, _UNTIL, _LENT):
            _check_count(name, state[name])
        seen = state[_SEEN]
        if not (isinstance(seen, float) and (0 <= seen <= _FP32.max or seen == inf)):
            raise LossScaleError(f"{_SEEN}={seen!r} is no magnitude in fp32")


def _room(scale: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Doublings that leave `_ROOM` over the largest gradient seen."""
    # Only whole doublings: a scale that is a power of two loses no digit.
    room = (largest(NARROWEST) / _ROOM / (seen * scale)).log2().floor()
    most = (_HIGHEST / scale).log2().floor().clamp(0, _MOST)
    return torch.where(seen > 0, room.clamp(min=0).minimum(most), 0)


def resolve_loss_scale(given: Any, low: torch.dtype) -> LossScale:
    """The loss scale `convert(loss_scale=given)` means for compute dtype `low`.

    "auto" is dynamic for fp16 and none for bf16, whose range is fp32's.

    Raises:
        LossScaleError: `given` is none of "auto", "dynamic", "off", a positive number
            and a `LossScale`.
    """
    if isinstance(given, LossScale):
        return given
    if given == "auto":
        given = "dynamic" if needs_loss_scale(low) else "off"
    if given == "dynamic":
        return DynamicLossScale()
    if given == "off":
        return NoLossScale()
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return StaticLossScale(given)
    raise LossScaleError(
        f"loss_scale={given!r} is unknown; give 'auto', 'dynamic', 'off', a positive "
        "number, or a DynamicLossScale, StaticLossScale or NoLossScale"
    )


def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A 0-dim tensor that is never written to."""
    # The device is named because `torch.set_default_device` changes the default.
    return torch.tensor(value, dtype=dtype, device="cpu")


def free_to_read(flag: torch.Tensor) -> bool:
    """Whether `flag` is in the host's memory, so that reading it waits for nothing."""
    return flag.is_cpu


def _check_positive(name: str, value: Any) -> None:
    """Raises unless `value`, a number, and 1 / value are finite in fp32."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and _FP32.tiny <= value <= _FP32.max):
        raise LossScaleError(f"{name}={value!r} is not a positive finite number")


def _check_count(name: str, value: Any, least: int = 0) -> None:
    number = isinstance(value, int) and not isinstance(value, bool)
    if not (number and least <= value <= _LONGEST):
        raise LossScaleError(
            f"{name}={value!r} is not an integer from {least} to {_LONGEST}"
        )
