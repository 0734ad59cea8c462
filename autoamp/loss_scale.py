"""Loss scales: what gradients are multiplied by inside a graph, and how that moves.

Names and defaults are those of `torch.amp.GradScaler`, apart from `init_scale`, and two
things it has not: a floor (`min_scale`) and `hysteresis`.

The state is kept in 0-dim tensors and moved by tensor arithmetic, so that a step that
learns of an overflow on the GPU need not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoamp import compat
from autoamp.errors import LossScaleError

INIT_SCALE = 2.0**15
"""Half of GradScaler's 2**16, the largest power of two below fp16's largest number: the
gradient a loss has to itself, 1, does not overflow on the first step."""

MIN_SCALE = 2.0**-14
"""The smallest normal number of fp16.  A gradient that overflows even at this scale is
larger than 10**9, and the loss, or something before it, is at fault.  (Not 1, as in
DeepSpeed: where a script scales its loss by hand, ours goes below.)"""

LOOKS = 5
"""Steps in which a scale that climbs is told how large the gradients are."""

LATER = 200
"""Steps from look to look of one that has climbed: gradients shrink as models learn."""

_MOST = 12
"""Doublings of one climb: what a small scale has rounded to 0 is seen at the next."""

_ROOM, _ROOM_AT_LAST = 16, 1.8
"""What a climb leaves for larger gradients than were seen: less, once more were seen.
A power of two is then left between 1.8 and 3.6 times: within 4 also where gradients
shrink meanwhile."""

_DROP = 2.0**-7
"""On top of the back-off, where a climb is going to follow: eight powers of two."""


class LossScale:
    """Base of the loss scales; what `convert(loss_scale=...)` takes.

    A scale belongs to one run of training: its state moves.  Given to several models it
    is shared by them.
    """

    _config: tuple[str, ...] = ()

    def __init__(self, scale: float) -> None:
        self._scale = _scalar(scale)
        self._skipped = _scalar(0, torch.int64)
        self._given: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    # -- what a graph and an optimizer step need -----------------------------------

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and its inverse, 0-dim fp32 tensors on `device`.

        They are never written to: a backward that comes later finds what its forward
        was given.
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
        if bool(found_inf):
            self.update(found_inf)

    def count_skipped(self, found_inf: torch.Tensor) -> None:
        """Counts a step as skipped where `found_inf` (one element) is not 0."""
        found = (found_inf.reshape(()) != 0).long()
        self._skipped = self._skipped.to(found.device) + found

    @property
    def looks(self) -> bool:
        """Whether `look` is to be called after the next `update`; asked before that."""
        return False

    def look(
        self, largest: torch.Tensor | None, found_inf: bool | torch.Tensor
    ) -> None:
        """Moves the scale by how large gradients are.

        Args:
            largest: the largest fp16 gradient of a step, at its true value, 0-dim fp32;
                None where it is not known.
            found_inf: what `update` was given; as a bool where that is known here.
        """

    def heed(self, other: LossScale) -> None:
        """Takes over what `other` was told of gradients: this one scales them now."""

    @property
    def at_floor(self) -> bool:
        """Whether the scale cannot go lower although it would move."""
        return False

    # -- what a person reads -------------------------------------------------------

    @property
    def scale(self) -> float:
        """The scale in force; waits for the device."""
        return float(self._scale)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for an overflow so far; waits for the device."""
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
        """Takes over every field of what `state_dict` gave.

        Raises:
            LossScaleError: a field is missing, unknown or unusable; nothing is changed.
        """
        self.check(state)
        self._scale = _scalar(state["scale"])
        self._skipped = _scalar(state["skipped_steps"], torch.int64)
        self._given.clear()

    def __repr__(self) -> str:
        fields = ", ".join(f"{n}={getattr(self, n)!r}" for n in self._config)
        return f"{type(self).__name__}({fields})"

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
        wanted, got = set(self.state_dict()) - set(_CLIMB), set(state)
        problems = (
            [f"missing {', '.join(sorted(wanted - got))}"] if wanted - got else []
        )
        problems += [
            f"unknown {', '.join(map(repr, sorted(got - wanted, key=str)))}"
        ] * (not got <= wanted)
        if problems:
            raise LossScaleError(
                f"the saved state of {kind} does not fit: {'; '.join(problems)}"
            )
        _positive("scale", state["scale"])
        _count("skipped_steps", state["skipped_steps"])


class DynamicLossScale(LossScale):
    """A scale that grows while nothing overflows and backs off when something does.

    As `torch.amp.GradScaler`: times `growth_factor` after `growth_interval` steps in a
    row without an overflow (never to infinity), times `backoff_factor` at an overflow.

    One that climbs is sought besides: from the second step on it is doubled as often as
    leaves room for 16 times the largest fp16 gradient seen so far, in the fifth for 1.8
    times.  An overflow before that lowers it to 1/256, but not below 1, for the next
    step to climb from.  Every 200 steps from then on it is told again, and climbs where
    gradients shrink, until something overflows.  Then, and where gradients cannot be
    seen (a compiler's graphs, loops, bf16), it moves as any other.

    Args:
        init_scale: the scale to begin with.
        growth_factor, backoff_factor, growth_interval: as above.
        min_scale: the floor.  An overflow at the floor is an error, not a skipped step.
        hysteresis: overflows it takes, between two moves, to back off once (DeepSpeed's
            `hysteresis`); every one of those steps is skipped.
        climbs: whether it climbs.  By default where no `init_scale` is given: one that
            is stays exactly there until it grows or backs off.

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
        self._configure(
            {
                "init_scale": init_scale,
                "growth_factor": growth_factor,
                "backoff_factor": backoff_factor,
                "growth_interval": growth_interval,
                "min_scale": min_scale,
                "hysteresis": hysteresis,
            }
        )
        super().__init__(init_scale)
        self._tracker = _scalar(0, torch.int32)
        self._patience = _scalar(hysteresis, torch.int32)
        by_default = init_scale == INIT_SCALE and hysteresis == 1
        self._climbs = by_default if climbs is None else climbs
        self._looks = LOOKS if self._climbs else 0
        self._until = LATER
        self._largest = _scalar(0.0)

    def _configure(self, values: Mapping[str, Any]) -> None:
        for name in ("init_scale", "min_scale", "growth_factor", "backoff_factor"):
            _positive(name, values[name])
        for name in ("growth_interval", "hysteresis"):
            _count(name, values[name], least=1)
        if not values["growth_factor"] > 1:
            raise LossScaleError(
                f"growth_factor={values['growth_factor']!r} must be above 1"
            )
        if not values["backoff_factor"] < 1:
            raise LossScaleError(
                f"backoff_factor={values['backoff_factor']!r} must be below 1"
            )
        if values["min_scale"] > values["init_scale"]:
            raise LossScaleError(
                f"min_scale={values['min_scale']!r} is above "
                f"init_scale={values['init_scale']!r}"
            )
        self.init_scale = float(values["init_scale"])
        self.growth_factor = float(values["growth_factor"])
        self.backoff_factor = float(values["backoff_factor"])
        self.growth_interval = int(values["growth_interval"])
        self.min_scale = float(values["min_scale"])
        self.hysteresis = int(values["hysteresis"])

    def update(self, found_inf: torch.Tensor) -> None:
        """Moves the scale after a step; see the base class."""
        device = found_inf.device
        found = found_inf.reshape(())
        # New tensors, never in place: graphs that have yet to run backward hold these.
        scale = self._scale.to(device).clone()
        tracker = self._tracker.to(device).clone()
        compat.update_scale(
            scale,
            tracker,
            found,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
        )
        scale.clamp_(min=self.min_scale)
        if self.hysteresis > 1:
            patience = self._patience.to(device) - found.int()
            # An overflow that is borne starts the count of clean steps anew, no more.
            borne = (found != 0) & (patience > 0)
            scale = torch.where(borne, self._scale.to(device), scale)
            moved = (tracker == 0) & ~borne
            self._patience = torch.where(moved, self.hysteresis, patience)
        self._scale, self._tracker = scale, tracker
        self._given.clear()
        if self._climbs and not self._looks:
            self._until = max(self._until - 1, 0)
            self._largest = torch.where(found != 0, torch.inf, self._largest.to(device))

    @property
    def looks(self) -> bool:
        """Whether it is still climbing, or due to see whether it may climb again."""
        return self._climbs and (self._looks > 0 or not self._until)

    def look(
        self, largest: torch.Tensor | None, found_inf: bool | torch.Tensor
    ) -> None:
        """Moves the scale by how large gradients are; see the base class."""
        if not self._looks:
            self._look_again(largest)
            return
        first, known = self._looks == LOOKS, isinstance(found_inf, bool)
        # An overflow has shown nothing: at least one look is to follow.
        self._looks = max(self._looks - 1, int(found_inf is True))
        if largest is None or not (self._looks or known):
            return  # no look is left to climb back from where an overflow might lead
        found = torch.as_tensor(found_inf, device=largest.device).reshape(()) != 0
        scale = self._scale.to(found.device)
        low = (scale * _DROP).maximum(scale.clamp(max=1.0)).clamp(min=self.min_scale)
        seen = self._largest.to(found.device).maximum(torch.where(found, 0, largest))
        self._largest = seen
        limit = _FP16_LARGEST / (_ROOM if self._looks else _ROOM_AT_LAST)
        room = (limit / (seen * scale)).log2().floor()
        room = room.clamp(0, 0 if first else _MOST)  # one batch is no measure
        high = torch.ldexp(scale, torch.where(seen > 0, room, 0))
        self._scale = torch.where(found, low, high)
        self._given.clear()

    def _look_again(self, largest: torch.Tensor | None) -> None:
        """A look after the climb, at one step of many: it halves what was seen before.

        So it takes several such looks until the scale follows gradients that shrink.
        After an overflow the largest seen is infinite, and stays so.
        """
        self._until = LATER
        if largest is None:
            return
        device = largest.device
        scale, before = self._scale.to(device), self._largest.to(device)
        seen = largest.nan_to_num(torch.inf, torch.inf).maximum(before / 2)
        room = (_FP16_LARGEST / _ROOM / (seen * scale)).log2().floor().clamp(0, _MOST)
        room = torch.where(seen > 0, room, 0)
        self._largest = seen
        self._scale = torch.ldexp(scale, room)
        self._tracker = torch.where(room > 0, 0, self._tracker.to(device))
        self._given.clear()

    def heed(self, other: LossScale) -> None:
        """Takes over what `other` was told of gradients; see the base class."""
        if isinstance(other, DynamicLossScale):
            theirs = other._largest.to(self._largest.device)
            self._largest = self._largest.maximum(theirs)

    def correct(self, found_inf: torch.Tensor) -> None:
        """Moves the scale for an overflow found late; see the base class."""
        if found_inf.device.type == "cpu":
            super().correct(found_inf)
            return
        before = self._scale, self._tracker, self._patience
        self.update(found_inf)
        found = found_inf.reshape(()) != 0
        after = self._scale, self._tracker, self._patience
        self._scale, self._tracker, self._patience = (
            torch.where(found, new.to(found.device), old.to(found.device))
            for new, old in zip(after, before, strict=True)
        )

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
        if not self._climbs or _untouched(state):
            return state
        seen = float(self._largest)
        return state | {_LEFT: self._looks, _SEEN: seen, _UNTIL: self._until}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises LossScaleError where `load_state_dict(state)` would."""
        if isinstance(state, Mapping) and {_LEFT, _SEEN} <= set(state):
            _count(_LEFT, state[_LEFT])
            _count(_UNTIL, state.get(_UNTIL, LATER))
            if not (isinstance(state[_SEEN], float) and state[_SEEN] >= 0):
                raise LossScaleError(f"{_SEEN}={state[_SEEN]!r} is no magnitude")
            state = {k: v for k, v in state.items() if k not in _CLIMB}
        super().check(state)
        DynamicLossScale(**{name: state[name] for name in self._config})
        # A tracker beyond the interval would never meet it: no growth any more.
        for name, below in (
            ("growth_tracker", state["growth_interval"]),
            ("hysteresis_left", state["hysteresis"] + 1),
        ):
            _count(name, state[name])
            if state[name] >= below:
                raise LossScaleError(f"{name}={state[name]!r} is not below {below}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over every field, those of the constructor too; see the base class."""
        super().load_state_dict(state)
        mine = _untouched(state) and state["init_scale"] == self.init_scale
        self._configure(state)
        self._tracker = _scalar(state["growth_tracker"], torch.int32)
        self._patience = _scalar(state["hysteresis_left"], torch.int32)
        self._climbs = _LEFT in state or (self._climbs and mine)
        self._looks = state.get(_LEFT, self._looks if mine else 0)
        self._until = state.get(_UNTIL, LATER)
        self._largest = _scalar(state.get(_SEEN, 0.0))


class StaticLossScale(LossScale):
    """A scale that never moves; steps with an overflow are skipped.

    Raises:
        LossScaleError: `scale` is not a positive finite number.
    """

    def __init__(self, scale: float) -> None:
        _positive("loss_scale", scale)
        super().__init__(scale)

    def __repr__(self) -> str:
        return f"StaticLossScale({self.scale!r})"


class NoLossScale(LossScale):
    """No scaling, no check, and no skipped step: what bf16 needs."""

    def __init__(self) -> None:
        super().__init__(1.0)


LOSS_SCALES = ("auto", "dynamic", "off")
"""Names of loss scales; a number or a `LossScale` may be given as well."""


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
        given = "dynamic" if low == torch.float16 else "off"
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


def _untouched(state: Mapping[str, Any]) -> bool:
    """Whether no step has been taken at the scale of `state`."""
    begun = state["growth_tracker"] or state["skipped_steps"]
    return not begun and state["scale"] == state["init_scale"]


def _scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A 0-dim tensor, which nobody writes to: the same one where it is a usual one."""
    usual = _USUAL.get((value, dtype))
    if usual is not None:
        return usual
    return torch.tensor(value, dtype=dtype, device="cpu")


_USUAL = {
    (value, dtype): torch.tensor(value, dtype=dtype, device="cpu")
    for value, dtype in (
        (0.0, torch.float32),
        (1.0, torch.float32),
        (INIT_SCALE, torch.float32),
        (0, torch.int32),
        (1, torch.int32),
        (0, torch.int64),
    )
}
"""What most scales begin with.  A tensor takes as long to make as a model to walk."""


def _positive(name: str, value: Any) -> None:
    """In fp32, where it is used, and so that 1 / value is finite there."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and _SMALLEST <= value <= _LARGEST):
        raise LossScaleError(f"{name}={value!r} is not a positive finite number")


def _count(name: str, value: Any, least: int = 0) -> None:
    number = isinstance(value, int) and not isinstance(value, bool)
    if not (number and least <= value <= _LONGEST):
        raise LossScaleError(
            f"{name}={value!r} is not an integer from {least} to {_LONGEST}"
        )


_CLIMB = _LEFT, _SEEN, _UNTIL = "looks_left", "largest_gradient", "steps_until_look"
"""Fields of a state that only a scale which climbs has."""
_FP16_LARGEST = torch.finfo(torch.float16).max
_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max
_LONGEST = torch.iinfo(torch.int32).max
