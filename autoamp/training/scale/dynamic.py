"""The loss scale that backs off at an overflow and grows while there is none.

Names and defaults are as in `torch.amp.GradScaler`, apart from `init_scale`, and from
two settings that GradScaler does not have: a floor (`min_scale`) and `hysteresis`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoamp import compat
from autoamp.errors import LossScaleError
from autoamp.training.scale.base import INIT_SCALE, LossScale, count, positive, scalar
from autoamp.training.scale.by_gradient_size import FIELDS, Climb

MIN_SCALE = 2.0**-14
"""The smallest normal number of fp16.  A gradient that overflows even at this scale is
larger than 10**9, and the loss, or something before it, is at fault.  (The floor is not
1, as in DeepSpeed: where a script scales its loss by hand, our scale goes below 1.)"""


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
        self._tracker = scalar(0, torch.int32)
        self._patience = scalar(hysteresis, torch.int32)
        by_default = init_scale == INIT_SCALE and hysteresis == 1
        climbs = by_default if climbs is None else climbs
        self._climb = Climb() if climbs else None

    def _configure(self, values: Mapping[str, Any]) -> None:
        for name in ("init_scale", "min_scale", "growth_factor", "backoff_factor"):
            positive(name, values[name])
        for name in ("growth_interval", "hysteresis"):
            count(name, values[name], least=1)
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
        self._move(found_inf)
        if self._climb is not None:
            self._climb.count_step()

    def _move(self, found_inf: torch.Tensor) -> None:
        device = found_inf.device
        found = found_inf.reshape(())
        # The tensors are replaced, never written to, because graphs that have yet to
        # run backward hold them.
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
            # An overflow that is borne only starts the count of clean steps anew.
            borne = (found != 0) & (patience > 0)
            scale = torch.where(borne, self._scale.to(device), scale)
            moved = (tracker == 0) & ~borne
            self._patience = torch.where(moved, self.hysteresis, patience)
        if self._climb is not None:
            scale = self._climb.moved(self._scale, scale, found)
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
        told = scale.isfinite() & steps.isfinite()
        mine, tracker = (each.to(scale.device) for each in self.position)
        self._scale = torch.where(told, scale, mine)
        self._tracker = torch.where(told, steps, tracker).int()
        self._given.clear()

    def correct(self, found_inf: torch.Tensor) -> None:
        """Moves the scale for an overflow found late; see the base class."""
        if found_inf.device.type == "cpu":
            super().correct(found_inf)
            return
        before = self._scale, self._tracker, self._patience
        self._move(found_inf)
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
        return state if self._climb is None else state | self._climb.state_dict()

    def _fields(self) -> set[str]:
        return super()._fields() - FIELDS

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises LossScaleError where `load_state_dict(state)` would."""
        if isinstance(state, Mapping):
            Climb.check(state)
            state = {k: v for k, v in state.items() if k not in FIELDS}
        super().check(state)
        DynamicLossScale(**{name: state[name] for name in self._config})
        # A tracker beyond the interval would never meet the interval, so that the scale
        # would never grow again.
        for name, below in (
            ("growth_tracker", state["growth_interval"]),
            ("hysteresis_left", state["hysteresis"] + 1),
        ):
            count(name, state[name])
            if state[name] >= below:
                raise LossScaleError(f"{name}={state[name]!r} is not below {below}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over every field, the constructor's too; see the base class."""
        super().load_state_dict(state)
        mine = _untouched(state) and state["init_scale"] == self.init_scale
        self._configure(state)
        self._tracker = scalar(state["growth_tracker"], torch.int32)
        self._patience = scalar(state["hysteresis_left"], torch.int32)
        fresh = Climb() if mine and self._climb is not None else None
        self._climb = Climb.of(state) or fresh


def _untouched(state: Mapping[str, Any]) -> bool:
    """Whether no step has been taken at the scale of `state`."""
    begun = state["growth_tracker"] or state["skipped_steps"]
    return not begun and state["scale"] == state["init_scale"]
