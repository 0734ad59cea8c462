"""How a dynamic loss scale finds its place by the size of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import torch

from autoamp.dtypes import NARROWEST, largest
from autoamp.errors import LossScaleError
from autoamp.training.scale.base import count, free_to_read, scalar

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

_LARGEST = largest(NARROWEST)
_FP32_MOST = largest(torch.float32)

_HIGHEST = 2.0**126
"""The inverse of a higher scale is no normal number of fp32."""

_LEFT, _SEEN = "looks_left", "largest_gradient"
_UNTIL, _LENT = "steps_until_look", "doublings_lent"
FIELDS = frozenset({_LEFT, _SEEN, _UNTIL, _LENT})
"""The additional fields in the state of a scale that climbs."""


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
        """The new scale after a step.

        The result is `after`, save where a step after the first looks overflowed with
        lent doublings in the scale: then it is `before` without those doublings.

        Args:
            before: the scale in the step.
            after: the scale as `found_inf` has moved it.
            found_inf: 0-dim, 0 or 1.
        """
        if self.left:
            return after
        if free_to_read(found_inf) and not found_inf:
            return after
        found, lent = found_inf != 0, self.lent.to(found_inf.device)
        self.largest_seen = torch.where(
            found, torch.inf, self.largest_seen.to(found.device)
        )
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
        found = (
            torch.as_tensor(
                found_inf, dtype=torch.float32, device=largest.device
            ).reshape(())
            != 0
        )
        scale = scale.to(found.device)
        low = (scale * _DROP).maximum(scale.clamp(max=1.0)).clamp(min=floor)
        # `largest` may be infinite without a flag, in gradients that were thrown away.
        tells = ~found & largest.isfinite()
        seen = self.largest_seen.to(found.device).maximum(
            torch.where(tells, largest, 0)
        )
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
    def of(cls, state: Mapping[str, Any]) -> Climb | None:
        """The climb that fields of `state` describe; None without such fields."""
        if _LEFT not in state:
            return None
        climb = cls(state[_LEFT])
        climb.until = state[_UNTIL]
        climb.largest_seen = scalar(state[_SEEN])
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
        seen = state[_SEEN]
        if not (isinstance(seen, float) and (0 <= seen <= _FP32_MOST or seen == inf)):
            raise LossScaleError(f"{_SEEN}={seen!r} is no magnitude in fp32")


def _room(scale: torch.Tensor, seen: torch.Tensor, times: float) -> torch.Tensor:
    """Doublings that leave room for gradients `times` as large as the largest seen."""
    room = (_LARGEST / times / (seen * scale)).log2().floor()
    most = (_HIGHEST / scale).log2().floor().clamp(0, _MOST)
    return torch.where(seen > 0, room.clamp(min=0).minimum(most), 0)
