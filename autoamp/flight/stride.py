"""How many steps apart a step's numbers are noted, so that a recorder costs little.

The recorder measures itself.  Where the numbers of each step would take more than
`SHARE` of the training's time, those of every second step are noted, or of every
fourth, and so on.  The distance is a power of two, and a step is noted where it divides
the step's number, so that two runs of unlike speed have noted steps in common.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SHARE = 0.02
"""The part of the training's time that a recorder may take."""

MOST = 256
_FIRST = 5
"""The steps after which the first distance is chosen: first calls are slow."""

_LOOKED_AT = 9


class Stride:
    """Chooses the distance from measured times; medians, since machines are shared.

    Attributes:
        every: the distance; 1 notes each step.
        own: seconds that the recorder took since the last step.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        self.every, self.own = 1, 0.0
        self._fixed, self._last, self._steps = fixed, 0.0, 0
        self._whole: deque[float] = deque(maxlen=_LOOKED_AT)
        self._noted: deque[float] = deque(maxlen=_LOOKED_AT)
        self._light: deque[float] = deque(maxlen=_LOOKED_AT)

    def notes(self, step: int) -> bool:
        """Whether the numbers of a step are noted."""
        return step == 1 or not step % self.every

    def stepped(self, now: float, *, noted: bool) -> None:
        """A step is over; the training's own time is what the recorder did not take."""
        own, self.own = self.own, 0.0
        last, self._last = self._last, now
        if self._fixed:
            return
        self._steps += 1
        if self._steps <= 2:  # a capture is no step, and would be the first median
            return
        self._whole.append(now - last - own)
        (self._noted if noted else self._light).append(own)
        if noted and self._steps >= _FIRST:
            self._choose()

    def _choose(self) -> None:
        light = median(self._light) if self._light else 0.0
        more = max(0.0, median(self._noted) - light)
        left = SHARE * median(self._whole) - light
        wanted = more / left if left > 0 else MOST
        if wanted > self.every:
            while self.every < min(wanted, MOST):
                self.every *= 2
        elif self.every > 1 and wanted <= self.every / 4:  # not at the first quick step
            self.every //= 2
