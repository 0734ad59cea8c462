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

_LEFT, _SEEN, _UNTIL = "looks_left", "largest_gradient", "steps_until_look"
FIELDS = frozenset({_LEFT, _SEEN, _UNTIL})
"""What the state of a scale that climbs has besides."""


class Climb:
    """One scale's looks at its gradients: the first five, and every 200th step later.

    Attributes:
        left: looks left of the first.
        until: steps until the next look after those.
        seen: the largest fp16 gradient seen, at its true value, of which later looks
            forget a half each; infinite after an overflow that came later.
    """

    def __init__(self, left: int = LOOKS) -> None:
        self.left = left
        self.until = LATER
        self.seen = scalar(0.0)

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be looked at."""
        return self.left > 0 or not self.until

    def step(self, found_inf: torch.Tensor) -> None:
        """A step was taken, or skipped for `found_inf` (0-dim, 0 or 1)."""
        if not self.left:
            self.until = max(self.until - 1, 0)
        self.overflow(found_inf)

    def overflow(self, found_inf: torch.Tensor) -> None:
        """Ends later looks where `found_inf` (0-dim) is not 0."""
        if not self.left:
            seen = self.seen.to(found_inf.device)
            self.seen = torch.where(found_inf != 0, torch.inf, seen)

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
        seen = self.seen.to(found.device).maximum(torch.where(found, 0, largest))
        self.seen = seen
        room = _room(scale, seen, _ROOM if self.left else _ROOM_AT_LAST)
        if first:  # one batch is no measure
            room = room.clamp(max=0)
        return torch.where(found, low, torch.ldexp(scale, room))

    def _later(self, scale: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """After the climb: it takes several looks until the scale follows gradients."""
        scale, before = scale.to(largest.device), self.seen.to(largest.device)
        self.seen = largest.nan_to_num(torch.inf, torch.inf).maximum(before / 2)
        return torch.ldexp(scale, _room(scale, self.seen, _ROOM))

    def heed(self, other: Climb) -> None:
        """Takes over what `other` has seen: its gradients are scaled alike now."""
        self.seen = self.seen.maximum(other.seen.to(self.seen.device))

    def state_dict(self) -> dict[str, Any]:
        """Every field, as plain Python numbers."""
        seen = float(self.seen)
        return {_LEFT: self.left, _SEEN: seen, _UNTIL: self.until}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Climb | None:
        """The climb of which `state` has the fields; None if it has none."""
        if _LEFT not in state:
            return None
        climb = cls(state[_LEFT])
        climb.until = state.get(_UNTIL, LATER)
        climb.seen = scalar(state.get(_SEEN, 0.0))
        return climb

    @staticmethod
    def check(state: Mapping[str, Any]) -> None:
        """Raises LossScaleError where the fields in `state` are unusable."""
        if not FIELDS & set(state):
            return
        for name in (_LEFT, _SEEN):
            if name not in state:
                raise LossScaleError(f"the saved state has no {name}")
        count(_LEFT, state[_LEFT])
        count(_UNTIL, state.get(_UNTIL, LATER))
        if not (isinstance(state[_SEEN], float) and state[_SEEN] >= 0):
            raise LossScaleError(f"{_SEEN}={state[_SEEN]!r} is no magnitude")


def _room(scale: torch.Tensor, seen: torch.Tensor, times: float) -> torch.Tensor:
    """Doublings until gradients `times` as large as the largest seen overflow."""
    room = (_FP16_LARGEST / times / (seen * scale)).log2().floor().clamp(0, _MOST)
    return torch.where(seen > 0, room, 0)
