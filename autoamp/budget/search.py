"""The placements of least predicted time for each predicted error.

With a price for error, one minimum cut gives the placement of least time plus error.
The placements for all prices are the corners of the lower convex hull of (error, time);
they are found by cuts at the slopes between corners known so far, which is the
parametric search of Eisner and Severance, "Mathematical techniques for efficient record
segmentation in large shared databases" (1976).  Between two corners, the ops in which
the corners differ go to fp32 one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoamp.budget.scene import Labels, Part, Scene
from autoamp.place.cost import UNIT_NS

_CORNERS = 48
"""The most corners: far more than a plot or a budget can tell apart."""

_FEW = 24
"""The most ops for which a greedy search is made as well."""

_STEPS = 24
"""The most placements between two corners."""


@dataclass(frozen=True, eq=False)
class Found:
    """One placement.

    Attributes:
        labels: the low nodes of each graph.
        nanoseconds: the predicted time.
        squares: the square of the predicted error, by measure.
        share: the sum of the squares, each over the square of its limit.
    """

    labels: Labels
    nanoseconds: float
    squares: Mapping[str, float]
    share: float

    @property
    def count(self) -> int:
        """The number of low nodes."""
        return sum(map(len, self.labels.values()))

    def errors(self) -> dict[str, float]:
        """The predicted error of each measure."""
        return {m: math.sqrt(s) for m, s in self.squares.items()}

    def fits(self, limits: Mapping[str, float], times: float) -> bool:
        """Whether each predicted error is at most `times` its limit."""
        return all(
            self.squares.get(m, 0.0) <= (times * limit) ** 2
            for m, limit in limits.items()
        )


class Search:
    """Finds the placements of one scene, for one set of limits."""

    def __init__(self, scene: Scene, limits: Mapping[str, float]) -> None:
        self.scene = scene
        self.weights = {m: 1 / limit**2 for m, limit in limits.items()}

    def placement(self, labels: Labels) -> Found:
        """A placement with its predicted time and errors."""
        squares = self.scene.squares(labels)
        share = sum(w * squares.get(m, 0.0) for m, w in self.weights.items())
        return Found(labels, self.scene.nanoseconds(labels), squares, share)

    def frontier(self) -> list[Found]:
        """The placements, the most exact first, each faster than the one before."""
        exact = self.placement(self.scene.nothing)
        fastest = self._at(0.0)
        found = [exact, *self._corners(exact, fastest), fastest]
        found.sort(key=lambda each: each.share)
        steps = [step for pair in pairwise(found) for step in self._between(*pair)]
        return _pareto([*found, *steps, *self._worst_first(fastest)])

    def _at(self, rate: float) -> Found:
        """The placement of least cost, where a share of 1 costs `rate` nanoseconds."""
        rates = {m: rate / UNIT_NS * w for m, w in self.weights.items()}
        return self.placement(self.scene.solved(rates))

    def _corners(self, exact: Found, fast: Found) -> list[Found]:
        """The corners between two placements, of which the second is faster."""
        todo = [(exact, fast)]
        found: list[Found] = []
        while todo and len(found) < _CORNERS:
            a, b = todo.pop(0)
            if b.share <= a.share or b.nanoseconds >= a.nanoseconds:
                continue
            if math.isinf(b.share):
                rate = (a.nanoseconds - b.nanoseconds) / 1e6
            else:
                rate = (a.nanoseconds - b.nanoseconds) / (b.share - a.share)
            middle = self._at(rate)
            if _cost(middle, rate) >= min(_cost(a, rate), _cost(b, rate)) * (1 - 1e-9):
                continue
            found.append(middle)
            todo += [(a, middle), (middle, b)]
        return found

    def _between(self, exact: Found, fast: Found) -> Iterator[Found]:
        """Placements between two corners: from the fast one, op by op.

        The op that goes to fp32 first is the one that lessens the error most for the
        time that its return to fp32 costs.
        """
        more = fast.share - exact.share
        rate = (exact.nanoseconds - fast.nanoseconds) / more if more > 0 else 0.0
        rates = {m: rate / UNIT_NS * w for m, w in self.weights.items()}
        moved = [
            (part, name)
            for part in self.scene.parts
            for name in sorted(fast.labels[part.name] - exact.labels[part.name])
            if part.record.classified.is_allowed(name)
        ]
        if len(moved) < 2 or not 0.0 < rate < math.inf:
            return
        alone = {
            (part.name, name): self._without(fast, part, [name], rates)
            for part, name in moved
        }
        moved.sort(key=lambda each: _slope(alone[each[0].name, each[1]], fast))
        now, gone = fast, dict[str, list[str]]()
        for part, name in moved[:_STEPS]:
            gone.setdefault(part.name, []).append(name)
            now = self._without(now, part, gone[part.name], rates)
            yield now

    def _worst_first(self, fast: Found) -> Iterator[Found]:
        """Placements as a greedy search makes them: the worst op goes to fp32, again.

        A small model has few corners, with large gaps between them.  A large model has
        so many ops that the gaps are small, and a greedy search takes long.
        """
        left = [
            (part, name)
            for part in self.scene.parts
            for name in sorted(fast.labels[part.name])
            if part.record.classified.is_allowed(name)
        ]
        if len(left) > _FEW:
            return
        now, gone = fast, dict[str, list[str]]()
        while left:
            tries = [
                self._without(now, part, [*gone.get(part.name, ()), name], {})
                for part, name in left
            ]
            at = min(range(len(tries)), key=lambda i: tries[i].share)
            part, name = left.pop(at)
            gone.setdefault(part.name, []).append(name)
            now = tries[at]
            yield now

    def _without(
        self, found: Found, part: Part, names: Sequence[str], rates: Mapping[str, float]
    ) -> Found:
        """A placement with some ops of one graph in fp32, and their neighbours anew."""
        low = part.solved(rates, names)
        return self.placement({**found.labels, part.name: low})


def _cost(found: Found, rate: float) -> float:
    return found.nanoseconds + (rate * found.share if rate else 0.0)


def _slope(exact: Found, fast: Found) -> float:
    """The nanoseconds that a share of error costs."""
    return (exact.nanoseconds - fast.nanoseconds) / max(fast.share - exact.share, 1e-30)


def _pareto(found: Sequence[Found]) -> list[Found]:
    """The placements that no other beats in time and error, the most exact first."""
    kept: list[Found] = []
    for each in sorted(found, key=lambda f: (f.share, f.nanoseconds)):
        if not kept or each.nanoseconds < kept[-1].nanoseconds:
            kept.append(each)
    return kept
