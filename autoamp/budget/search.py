"""The graphs of a model as problems in which error has a price, and the placements of
least predicted time for each predicted error.

With a price for error, one minimum cut gives the placement of least time plus error.
The price is bisected: between two placements it is the slope between them, until no cut
finds a third one.  Between two such placements, the ops in which they differ go to fp32
one after the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autoamp.analyse.facts import FP32
from autoamp.budget.sensitivity import Squares, edges_of
from autoamp.options import Options
from autoamp.pipeline.run import placed_again
from autoamp.place.assign import Chosen, OpKey, keys_of, legal_energy
from autoamp.place.cost import UNIT_NS, as_authors_ask, price_graph
from autoamp.place.mincut import Again
from autoamp.place.policies import project
from autoamp.place.problem import build_problem, least_cost
from autoamp.place.two_sides import Crossing, Problem
from autoamp.rewrite.rewritten import Rewritten

Labels = Mapping[str, frozenset[str]]
"""The low nodes of each part, by the part's name."""

_OVERFLOWS = "its numbers leave the range of the compute dtype"
_UNKNOWN = (
    "no batch of calibrate_on= ran it, or no derivative reaches it: its error is not "
    "known"
)

PINS = frozenset({_OVERFLOWS, _UNKNOWN})
"""The reasons for which an op stays fp32 whatever the budget."""

_MOST = 10**15
"""The largest price of an error, in units; sums of it are exact."""


@dataclass(frozen=True, eq=False)
class Pair:
    """One use of a value, and the squares that it adds, by measure."""

    maker: str
    reader: str
    down: Mapping[str, float]
    up: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Part:
    """One graph, or one body, with its prices of time and its squares of errors.

    Attributes:
        name: which graph it is.
        record: the pass's record of the graph.
        problem: the problem of least time.
        runs: how often a call runs it.
        keys: the key of each op.
        own: node to the squares of being low, by measure.
        pairs: the uses of values that add squares.
    """

    name: str
    record: Rewritten
    problem: Problem
    runs: float
    keys: Mapping[str, OpKey]
    own: Mapping[str, Mapping[str, float]]
    pairs: Sequence[Pair]
    _again: dict[tuple[tuple[str, float], ...], Again] = field(default_factory=dict)

    def units(self, low: frozenset[str]) -> float:
        """The predicted time of a placement, in units of price."""
        return self.runs * legal_energy(self.problem, low)

    def squares(self, low: frozenset[str]) -> dict[str, float]:
        """The square of the predicted error of a placement, by measure."""
        found: dict[str, float] = {}
        for name in low:
            _add(found, self.own.get(name, {}))
        for pair in self.pairs:
            made, read = pair.maker in low, pair.reader in low
            if made != read:
                _add(found, pair.up if made else pair.down)
        return found

    def priced(self, rates: Mapping[str, float]) -> Problem:
        """The problem in which squares of errors cost `rates` units each."""

        def price(squares: Mapping[str, float]) -> int:
            total = sum(rates.get(m, 0.0) * s for m, s in squares.items())
            return min(_MOST, round(total)) if total < math.inf else _MOST

        unary = dict(self.problem.unary)
        for name, squares in self.own.items():
            high, low = unary[name]
            unary[name] = (high, low + price(squares))
        crossings = [
            Crossing(p.maker, p.reader, price(p.down), price(p.up)) for p in self.pairs
        ]
        return dataclasses.replace(self.problem, unary=unary, crossings=crossings)

    def solved(
        self, rates: Mapping[str, float], kept: Iterable[str] = ()
    ) -> frozenset[str]:
        """The placement of least cost where squares of errors cost `rates` each.

        Args:
            kept: nodes that stay fp32.
        """
        kept = list(kept)
        if not kept:
            return least_cost(self.priced(rates))[0]
        key = tuple(sorted(rates.items()))
        if key not in self._again:
            self._again.clear()
            self._again[key] = Again(self.priced(rates))
        found = self._again[key].held(kept, at_source=False)
        assert found is not None, "everything in fp32 is legal"
        return found.source


@dataclass(frozen=True, eq=False)
class Scene:
    """All graphs of a model, placed together.

    Attributes:
        parts: the graphs and bodies.
        below_ceiling: whether ops that type promotion leaves fp32 may be low.
    """

    parts: Sequence[Part]
    below_ceiling: bool = False
    nothing: Labels = field(init=False)

    def __post_init__(self) -> None:
        none: frozenset[str] = frozenset()
        object.__setattr__(self, "nothing", {p.name: none for p in self.parts})

    def solved(self, rates: Mapping[str, float]) -> Labels:
        """The placement of least cost where squares of errors cost `rates` each."""
        return {part.name: part.solved(rates) for part in self.parts}

    def nanoseconds(self, labels: Labels) -> float:
        """The predicted time of one call."""
        units = sum(part.units(labels[part.name]) for part in self.parts)
        return units * UNIT_NS

    def squares(self, labels: Labels) -> dict[str, float]:
        """The square of the predicted error of one call, by measure."""
        found: dict[str, float] = {}
        for part in self.parts:
            _add(found, part.squares(labels[part.name]))
        return found

    def everything(self) -> Labels:
        """Every op low that may be."""
        return {p.name: project(p.problem, p.problem.unary) for p in self.parts}

    def chosen(self, labels: Labels) -> Chosen:
        """The placement, for any capture of the model."""
        low: set[OpKey] = set()
        high: set[OpKey] = set()
        for part in self.parts:
            here = {part.keys[n] for n in labels[part.name] if n in part.keys}
            low |= here
            high |= set(part.keys.values()) - here
        # An op that two captures place apart stays fp32, which is more exact.
        return Chosen(frozenset(low - high), frozenset(low | high), self.below_ceiling)


def scene_of(
    records: Iterable[tuple[Rewritten, float]],
    found: Mapping[str, Squares],
    options: Options,
    *,
    below_ceiling: bool = False,
) -> Scene:
    """The scene of the graphs of a model.

    Args:
        records: each graph, and how often a call runs it.
        found: the squares of each measure.
        options: the options of the conversion.
        below_ceiling: whether ops that type promotion leaves fp32 may be low.
    """
    parts = []
    for number, (record, runs) in enumerate(records):
        for at, each in enumerate(record.with_bodies()):
            here = _without_ceiling(each, options) if below_ceiling else each
            parts.append(_part(f"{number}.{at}", here, runs, found))
    return Scene(parts, below_ceiling)


def _without_ceiling(record: Rewritten, options: Options) -> Rewritten:
    """The record of the same graph, in which the ceiling pins no op."""
    chosen = Chosen(frozenset(), frozenset(), below_ceiling=True)
    options = dataclasses.replace(options, chosen=chosen)
    return placed_again(record, options, record.given_up)


def _part(
    name: str, record: Rewritten, runs: float, found: Mapping[str, Squares]
) -> Part:
    keys = keys_of(record.classified)
    problem = _by_time_alone(record)
    known = {k for squares in found.values() for k in squares.known}
    pins = {
        n: _UNKNOWN
        for n in problem.unary
        if n in keys and keys[n] not in known and n not in problem.at_sink
    }
    own = {
        n: {m: s.own[keys[n]] for m, s in found.items() if keys[n] in s.own}
        for n in problem.unary
        if n in keys
    }
    pins |= {
        n: _OVERFLOWS
        for n, squares in own.items()
        if any(math.isinf(s) for s in squares.values()) and n not in problem.at_sink
    }
    problem = dataclasses.replace(problem, at_sink={**problem.at_sink, **pins})
    return Part(name, record, problem, runs, keys, own, _pairs(record, keys, found))


def _by_time_alone(record: Rewritten) -> Problem:
    """The problem of a graph without the reward that `do_no_harm=False` gives.

    That option asks for low precision whether it pays or not.  The time to start an op
    or a cast, which is what makes low precision lose on a small model, then counts for
    nothing.
    """
    assignment = record.assignment
    if not assignment.prices.reward:
        return assignment.problem
    device = dataclasses.replace(assignment.prices.device, launch_ns=0.0)
    prices = price_graph(
        record.before,
        record.classified,
        device,
        objective="time",
        do_no_harm=True,
        free_weights=True,
    )
    prices = as_authors_ask(prices, record.classified)
    return build_problem(record.classified, prices, assignment.returned_inside)


def _pairs(
    record: Rewritten, keys: Mapping[str, OpKey], found: Mapping[str, Squares]
) -> list[Pair]:
    """The uses of values in a graph that add squares."""
    facts, known = record.facts, record.assignment.problem.unary
    pairs = []
    for (name, value), edge in edges_of(record.classified, keys).items():
        maker, reader = facts.producer(value), name if edge.is_rounded else FP32
        if maker not in known or reader not in known or maker == reader:
            continue
        down = {m: s.down[edge] for m, s in found.items() if edge in s.down}
        up = {m: s.up[edge] for m, s in found.items() if edge in s.up}
        if edge.is_rounded or up:
            pairs.append(Pair(maker, reader, down, up))
    return pairs


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for measure, square in more.items():
        total[measure] = total.get(measure, 0.0) + square


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
        """The corners of the lower hull of (error, time) between two placements.

        Eisner and Severance, "Mathematical techniques for efficient record segmentation
        in large shared databases" (1976).
        """
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
