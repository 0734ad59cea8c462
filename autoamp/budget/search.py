"""The placements of least predicted time for each predicted error.

With a price for error, one minimum cut gives the placement of least time plus error.
The placements for all prices are the corners of the lower convex hull of (error, time);
they are found by cuts at the slopes between corners known so far, which is the
parametric search of Eisner and Severance, "Mathematical techniques for efficient record
segmentation in large shared databases" (1976).  Between two corners, the ops in which
the corners differ are moved group by group, the group that saves most time for its
error first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from autoamp.budget.scene import Labels, Part, Scene
from autoamp.place.cost import UNIT_NS
from autoamp.place.policies import project

_CORNERS = 48
"""The most corners: far more than a plot or a budget can tell apart."""

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
        return _pareto([*found, *steps])

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
        """Placements between two corners: from the exact one, group by group."""
        groups = [
            (part, group)
            for part in self.scene.parts
            for group in _groups(part, fast.labels[part.name] - exact.labels[part.name])
        ]
        if len(groups) < 2:
            return
        groups.sort(key=lambda each: _slope(exact, self._with(exact, *each)))
        now = exact
        for part, group in groups[:_STEPS]:
            now = self._with(now, part, group)
            yield now

    def _with(self, found: Found, part: Part, more: frozenset[str]) -> Found:
        low = project(part.problem, found.labels[part.name] | more)
        return self.placement({**found.labels, part.name: low})


def _cost(found: Found, rate: float) -> float:
    return found.nanoseconds + (rate * found.share if rate else 0.0)


def _slope(exact: Found, faster: Found) -> float:
    """Nanoseconds a share of error, below 0 where time is saved."""
    more = max(faster.share - exact.share, 1e-30)
    return (faster.nanoseconds - exact.nanoseconds) / more


def _groups(part: Part, names: frozenset[str]) -> list[frozenset[str]]:
    """The connected groups of nodes, by the uses of values among them."""
    graph = nx.Graph()
    graph.add_nodes_from(sorted(names))
    for group in part.problem.groups:
        near = [n for n in (group.value, *group.readers) if n in names]
        graph.add_edges_from((near[0], other) for other in near[1:])
    return [frozenset(each) for each in nx.connected_components(graph)]


def _pareto(found: Sequence[Found]) -> list[Found]:
    """The placements that no other beats in time and error, the most exact first."""
    kept: list[Found] = []
    for each in sorted(found, key=lambda f: (f.share, f.nanoseconds)):
        if not kept or each.nanoseconds < kept[-1].nanoseconds:
            kept.append(each)
    return kept
