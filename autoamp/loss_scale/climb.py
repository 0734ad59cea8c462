"""How a dynamic loss scale finds its place by the size of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoamp.errors import LossScaleError
from autoamp.loss_scale.base import count, scalar

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

_FP16_LARGEST = torch.finfo(torch.float16).max

_HIGHEST = 2.0**126
"""A scale above has an inverse that is no normal number of fp32."""

_LEFT, _SEEN = "looks_left", "largest_gradient"
_UNTIL, _LENT = "steps_until_look", "doublings_lent"
FIELDS = frozenset({_LEFT, _SEEN, _UNTIL, _LENT})
"""What the state of a scale that climbs has besides."""


class Climb:
    """One scale's looks at its gradients: the first five, and every 200th step later.

    What a later look climbs is lent: the first overflow takes it back and ends those
    looks.  So they cost one skipped step at most.

    Attributes:
        left: looks left of the first.
        until: steps until the next look after those.
        seen: the largest fp16 gradient seen, at its true value, of which later looks
            forget a half each; infinite after an overflow that came later.
        lent: doublings that later looks have made.
    """

    def __init__(self, left: int = LOOKS) -> None:
        self.left = left
        self.until = LATER
        self.seen = scalar(0.0)
        self.lent = scalar(0.0)

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be looked at."""
        return self.left > 0 or not self.until

    def count_step(self) -> None:
        """A step was taken, or skipped."""
        if not self.left:
            self.until = max(self.until - 1, 0)

    def moved(
        self, before: torch.Tensor, after: torch.Tensor, found_inf: torch.Tensor
    ) -> torch.Tensor:
        """Where the scale is to go after a step that was not looked at.

        That is `after`, save where the step overflowed at doublings that were lent:
        then it is `before` without those doublings.

        Args:
            before: the scale in the step.
            after: where the scale has moved for `found_inf`.
            found_inf: 0-dim, 0 or 1.
        """
        if self.left:
            return after
        if found_inf.device.type == "cpu" and not found_inf:
            return after  # reading `found_inf` there makes nobody wait
        found, lent = found_inf != 0, self.lent.to(found_inf.device)
        self.seen = torch.where(found, torch.inf, self.seen.to(found.device))
        self.lent = torch.where(found, 0, lent)
        back = torch.ldexp(before.to(found.device), -lent)
        return torch.where(found & (lent > 0), back, after)

    def scale_after(
        self,
        scale: torch.Tensor,
        largest: torch.Tensor | None,
        found_inf: bool | torch.Tensor,
        floor: float,
    ) -> torch.Tensor:
        """Where the scale is to go after a look; `scale` itself where it stays.

        Args:
            scale: where it is, after the step.
            largest, found_inf: as of `LossScale.look`.
            floor: below which it is not lowered.
        """
        if not self.left:
            self.until = LATER
            return scale if largest is None else self._later(scale, largest)
        first, known = self.left == LOOKS, isinstance(found_inf, bool)
        # An overflow has shown nothing: at least one look is to follow.
        self.left = max(self.left - 1, int(found_inf is True))
        if largest is None or not (self.left or known):
            return scale  # no look is left to climb back from where an overflow leads
        found = torch.as_tensor(found_inf, device=largest.device).reshape(()) != 0
        scale = scale.to(found.device)
        low = (scale * _DROP).maximum(scale.clamp(max=1.0)).clamp(min=floor)
        # Not finite where nobody counts it: gradients that were thrown away.
        tells = ~found & largest.isfinite()
        seen = self.seen.to(found.device).maximum(torch.where(tells, largest, 0))
        self.seen = seen
        room = _room(scale, seen, _ROOM if self.left else _ROOM_AT_LAST)
        room = torch.where(tells, room, 0)
        if first:  # one batch is no measure
            room = room.clamp(max=0)
        return torch.where(found, low, torch.ldexp(scale, room))

    def _later(self, scale: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """After the climb: it takes several looks until the scale follows gradients."""
        scale, before = scale.to(largest.device), self.seen.to(largest.device)
        tells = largest.isfinite() & (largest > 0)
        self.seen = torch.where(tells, largest.maximum(before / 2), before)
        room = torch.where(tells, _room(scale, self.seen, _ROOM), 0)
        self.lent = self.lent.to(room.device) + room
        return torch.ldexp(scale, room)

    def heed(self, other: Climb) -> None:
        """Takes over what `other` has seen: its gradients are scaled alike now."""
        self.seen = self.seen.maximum(other.seen.to(self.seen.device))

    def state_dict(self) -> dict[str, Any]:
        """Every field, as plain Python numbers."""
        return {
            _LEFT: self.left,
            _SEEN: float(self.seen),
            _UNTIL: self.until,
            _LENT: int(self.lent),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Climb | None:
        """The climb of which `state` has the fields; None if it has none."""
        if _LEFT not in state:
            return None
        climb = cls(state[_LEFT])
        climb.until = state[_UNTIL]
        climb.seen = scalar(state[_SEEN])
        climb.lent = scalar(float(state[_LENT]))
        return climb

    @staticmethod
    def check(state: Mapping[str, Any]) -> None:
        """Raises LossScaleError where the fields in `state` are unusable."""
        missing = FIELDS - set(state)
        if missing == FIELDS:
            return
        if missing:
            names = ", ".join(sorted(missing))
            raise LossScaleError(f"the state of a scale that climbs is missing {names}")
        for name in (_LEFT, _UNTIL, _LENT):
            count(name, state[name])
        if not (isinstance(state[_SEEN], float) and state[_SEEN] >= 0):
            raise LossScaleError(f"{_SEEN}={state[_SEEN]!r} is no magnitude")


def _room(scale: torch.Tensor, seen: torch.Tensor, times: float) -> torch.Tensor:
    """Doublings until gradients `times` as large as the largest seen overflow."""
    room = (_FP16_LARGEST / times / (seen * scale)).log2().floor()
    most = (_HIGHEST / scale).log2().floor().clamp(0, _MOST)
    return torch.where(seen > 0, room.clamp(min=0).minimum(most), 0)
