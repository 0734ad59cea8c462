"""The law by which backwards move a loss scale, in plain Python numbers.

It is written without a look at the code that it is the reference of.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Law:
    """A loss scale that doubles after some clean backwards, and is halved by overflows.

    Attributes:
        scale: the scale in force, by which the next backward is scaled.
        growth_interval: how many clean backwards double the scale; 0 if it never moves.
        clean: the clean backwards that have counted since the scale moved.
        skipped: how many steps were skipped.
        fresh: whether no backward that trains has been since the last step.
        lowered: whether the last backward has lowered the scale.
    """

    scale: float
    growth_interval: int
    clean: int = 0
    skipped: int = 0
    fresh: bool = True
    lowered: bool = False

    def backward(
        self, overflows: bool, *, curable: bool = True, adds: bool = False
    ) -> None:
        """Moves the scale for a backward that computed gradients of weights.

        Args:
            overflows: whether a gradient of a weight that left the graph is not finite.
            curable: whether that is so of a run that only finite gradients entered.
            adds: whether the weights had gradients, to which the backward added.
        """
        counts, self.fresh = self.fresh or not adds, False
        if not self.growth_interval:
            return
        self.lowered = overflows and (curable or (counts and self.scale > 1))
        if self.lowered:
            self.scale, self.clean = self.scale / 2, 0
        elif counts and not overflows:
            self.clean += 1
            if self.clean == self.growth_interval:
                self.scale, self.clean = self.scale * 2, 0

    def step(self, *, skipped: bool) -> None:
        """Counts a step of an optimizer, which moves no scale."""
        self.fresh = True
        self.skipped += skipped

    def load(self, scale: float, clean: int, skipped: int) -> None:
        """Takes over a saved scale, but no higher one than has just overflowed."""
        moves = bool(self.growth_interval)
        self.scale = min(self.scale, scale) if self.lowered and moves else scale
        self.clean, self.skipped = clean, skipped
