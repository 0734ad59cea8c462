"""Loss scales: the factor on the gradients inside a graph, and how the factor moves.

The state is kept in 0-dim tensors and moved by tensor arithmetic, so that a step whose
overflow is known only on the GPU need not wait for the GPU.  These tensors are replaced
and never written to, because graphs that have yet to run backward hold them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_ROOM, _ROOM_AT_LAST = 16, 1.8
"""How many times larger than the largest seen a gradient may be after a look: less at
the last look, once more gradients were seen.  The scale moves by powers of two, so the
last look leaves between 1.8 and 3.6 times: within 4 also where gradients shrink
meanwhile."""

_DROP = 2.0**-7
"""The factor at an overflow, on top of the back-off, where a look is going to follow:
eight powers of two together."""

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

    def update(self, found_inf: torch.Tensor) -> None:
        """Moves the scale after a step.

        Args:
            found_inf: one fp32 element, 0 or 1, on any device; nothing waits for it.
        """

    def correct(self, found_inf: torch.Tensor) -> None:
        """Moves the scale for an overflow found after `update` was told of none.

        Nothing happens where `found_inf` (one element) is 0.
        """

    def count_skipped(self, found_inf: torch.Tensor) -> None:
        """Counts a step as skipped where `found_inf` (one element) is not 0."""
        found = (found_inf.reshape(()) != 0).long()
        self._skipped = self._skipped.to(found.device) + found

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

    def merge(self, other: LossScale) -> None:
        """Takes over the gradient sizes told to `other`, which this scale replaces."""

    @property
    def position(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale, and the steps since it last moved: 0-dim, on any device."""
        return self._scale, scalar(0, torch.int32)

    def set_agreed(self, scale: torch.Tensor, steps: torch.Tensor) -> None:
        """Takes over the position that ranks agreed on, unless it is not finite.

        Args:
            scale, steps: a `position`, 0-dim fp32; nothing waits for them.
        """

    @property
    def at_floor(self) -> bool:
        """Whether the scale is one that moves, but can go no lower."""
        return False

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
    `backoff_factor` at an overflow.

    A scale that climbs also goes by the size of gradients.  From the second step on the
    scale is doubled as often as leaves room for 16 times the largest fp16 gradient seen
    so far, in the fifth step for 1.8 times.  An overflow before that lowers the scale
    to 1/256, but not below 1, for the next step to climb from.  Every 200 steps from
    then on the scale is told the size of gradients again, and climbs where gradients
    shrink, until something overflows.  After that, and where gradients cannot be seen
    (a compiler's graphs, loops, bf16), the scale moves as any other.

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

    def update(self, found_inf: torch.Tensor) -> None:
        """Moves the scale after a step; see the base class."""
        self._move(found_inf)
        if self._climb is not None:
            self._climb.count_step()

    def _move(self, found_inf: torch.Tensor) -> None:
        device = found_inf.device
        found = found_inf.reshape(())
        # The kernel writes in place, and graphs that have yet to run backward hold the
        # tensors of now.
        scale = self._scale.to(device).clone()
        tracker = self._tracker.to(device).clone()
        compat.update_scale(
            scale,
            tracker,
            found,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        # Torch's kernel knows no floor: it halves a scale down to 0.
        scale.clamp_(min=self.min_scale)
        if self.hysteresis > 1:
            patience = self._patience.to(device) - found.int()
            # An overflow that is borne only starts the count of clean steps anew.
            borne = (found != 0) & (patience > 0)
            scale = torch.where(borne, self._scale.to(device), scale)
            # The kernel sets the tracker to 0 where the scale has grown or backed off.
            moved = (tracker == 0) & ~borne
            self._patience = torch.where(moved, self.hysteresis, patience)
        if self._climb is not None:
            scale = self._climb.moved(self._scale, scale, found)
        self._scale, self._tracker = scale, tracker
        self._given.clear()

    def correct(self, found_inf: torch.Tensor) -> None:
        """Moves the scale for an overflow found late; see the base class."""
        if free_to_read(found_inf):
            if bool(found_inf):
                self.update(found_inf)
            return
        # Both outcomes are computed, and the device chooses: reading the flag would
        # wait.
        before = self._scale, self._tracker, self._patience
        self._move(found_inf)
        found = found_inf.reshape(()) != 0
        after = self._scale, self._tracker, self._patience
        self._scale, self._tracker, self._patience = (
            torch.where(found, new.to(found.device), old.to(found.device))
            for new, old in zip(after, before, strict=True)
        )

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
        scale = self._climb.scale_after(before, largest, found_inf, self.min_scale)
        if scale is not before:
            moved = scale != before.to(scale.device)
            self._tracker = torch.where(moved, 0, self._tracker.to(scale.device))
            self._scale = scale
            self._given.clear()

    def merge(self, other: LossScale) -> None:
        """Takes over the sizes of gradients told to `other`; see the base class."""
        theirs = other._climb if isinstance(other, DynamicLossScale) else None
        if self._climb is not None and theirs is not None:
            self._climb.merge(theirs)

    @property
    def position(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale, and the steps since it last moved; see the base class."""
        return self._scale, self._tracker

    def set_agreed(self, scale: torch.Tensor, steps: torch.Tensor) -> None:
        """Takes over the position that ranks agreed on; see the base class."""
        # A scale that no rank spoke of comes back as an infinity.
        told = scale.isfinite() & steps.isfinite()
        mine, tracker = (each.to(scale.device) for each in self.position)
        self._scale = torch.where(told, scale, mine)
        self._tracker = torch.where(told, steps, tracker).int()
        self._given.clear()

    @property
    def at_floor(self) -> bool:
        """Whether the scale is at `min_scale`; waits for the device."""
        return self.scale <= self.min_scale

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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over every field, the constructor's too; see the base class."""
        super().load_state_dict(state)
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

    The doublings of a later look are lent: the first overflow takes them back and ends
    all climbing.  So the later looks cost one skipped step at most.

    Attributes:
        left: how many of the first looks are left.
        until: steps until the next look after the first ones.
        largest_seen: the largest fp16 gradient seen, at its true value, halved by each
            later look that sees only smaller ones; infinite after an overflow that came
            after the first looks.
        lent: doublings that later looks have made.
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
        self, before: torch.Tensor, after: torch.Tensor, found_inf: torch.Tensor
    ) -> torch.Tensor:
        """The new scale after a step that `found_inf` has moved from `before`.

        The result is `after`, save where a step after the first looks overflowed with
        lent doublings in the scale: then it is `before` without those doublings.
        """
        if self.left:
            return after
        if free_to_read(found_inf) and not found_inf:
            return after
        found, lent = found_inf != 0, self.lent.to(found_inf.device)
        # With an infinite size `_room` is 0 for good: an overflow after the first looks
        # ends all climbing.
        self.largest_seen = torch.where(
            found, torch.inf, self.largest_seen.to(found.device)
        )
        self.lent = torch.where(found, 0, lent)
        # Powers of two are exact in fp32: this is the very scale from before the loan.
        back = torch.ldexp(before.to(found.device), -lent)
        return torch.where(found & (lent > 0), back, after)

    def scale_after(
        self,
        scale: torch.Tensor,
        largest: torch.Tensor | None,
        found_inf: bool | torch.Tensor,
        floor: float,
    ) -> torch.Tensor:
        """The new scale after a look; `scale` itself where the scale stays.

        Args:
            scale: the scale after the step.
            largest, found_inf: as for `LossScale.note_size`.
            floor: the value below which the scale is not lowered.
        """
        if not self.left:
            self.until = LATER
            return scale if largest is None else self._later(scale, largest)
        first, known = self.left == LOOKS, isinstance(found_inf, bool)
        # An overflow has shown no size, so that at least one look is to follow.
        self.left = max(self.left - 1, int(found_inf is True))
        if largest is None or not (self.left or known):
            return scale  # no look is left to climb back after a drop by an overflow
        device = largest.device
        found = torch.as_tensor(found_inf, dtype=torch.float32, device=device)
        found = found.reshape(()) != 0
        scale = scale.to(device)
        # A scale of at most 1 is not dropped by the look: `update` has halved it.
        low = (scale * _DROP).maximum(scale.clamp(max=1.0)).clamp(min=floor)
        # `largest` may be infinite without a flag, in gradients that were thrown away.
        tells = ~found & largest.isfinite()
        seen = self.largest_seen.to(device).maximum(torch.where(tells, largest, 0))
        self.largest_seen = seen
        room = _room(scale, seen, _ROOM if self.left else _ROOM_AT_LAST)
        room = torch.where(tells, room, 0)
        if first:  # one batch is too little to climb by
            room = room.clamp(max=0)
        return torch.where(found, low, torch.ldexp(scale, room))

    def _later(self, scale: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """The new scale after a later look: it follows gradients over several looks."""
        scale, before = scale.to(largest.device), self.largest_seen.to(largest.device)
        tells = largest.isfinite() & (largest > 0)
        # Each look halves what is remembered, so that one old peak is forgotten.
        self.largest_seen = torch.where(tells, largest.maximum(before / 2), before)
        room = torch.where(tells, _room(scale, self.largest_seen, _ROOM), 0)
        self.lent = self.lent.to(room.device) + room
        return torch.ldexp(scale, room)

    def merge(self, other: Climb) -> None:
        """Takes over the largest gradient that `other` saw: one scale serves both."""
        self.largest_seen = self.largest_seen.maximum(
            other.largest_seen.to(self.largest_seen.device)
        )

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


def _room(scale: torch.Tensor, seen: torch.Tensor, times: float) -> torch.Tensor:
    """Doublings that leave room for gradients `times` as large as the largest seen."""
    # Only whole doublings: a scale that is a power of two loses no digit.
    room = (largest(NARROWEST) / times / (seen * scale)).log2().floor()
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
    """A 0-dim tensor that is never written to; a usual value has one shared tensor."""
    usual = _USUAL.get((value, dtype))
    if usual is not None:
        return usual
    # The device is named because `torch.set_default_device` changes the default.
    return torch.tensor(value, dtype=dtype, device="cpu")


_USUAL = {
    (value, dtype): torch.tensor(value, dtype=dtype, device="cpu")
    for dtype, values in (
        (torch.float32, (0.0, 1.0, INIT_SCALE)),
        (torch.int32, (0, 1)),
        (torch.int64, (0,)),
    )
    for value in values
}
"""Values most scales begin with: a program with many models makes them only once."""


def free_to_read(flag: torch.Tensor) -> bool:
    """Whether `flag` is in the host's memory, so that reading it waits for nothing."""
    return flag.device.type == "cpu"


def newly(flag: torch.Tensor, before: Sequence[torch.Tensor]) -> torch.Tensor:
    """`flag` where none of the flags `before` is set, else 0."""
    for other in before:
        flag = flag * (1 - other.to(flag.device))
    return flag


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
