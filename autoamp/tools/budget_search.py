"""The graphs of a model as problems in which error has a price, and the placements of
least predicted time for each predicted error.

With a price for error, one minimum cut gives the placement of least time plus error.
The price is bisected: between two placements it is the slope between them, until no cut
finds a third one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoamp.passes.decide.assign import Chosen, OpKey, keys_of, legal_energy
from autoamp.passes.decide.cost import UNIT_NS, as_authors_ask, price_graph
from autoamp.passes.decide.mincut import Group, Problem
from autoamp.passes.decide.policies import project
from autoamp.passes.decide.problem import build_problem, held, least_cost
from autoamp.passes.record import Rewritten
from autoamp.passes.run import placed_again
from autoamp.passes.see.facts import FP32
from autoamp.tools.budget_errors import Squares, edges_of
from autoamp.training.options import Options

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

_CORNERS = 48
"""The most prices of error that are tried: more than a plot or a budget can tell
apart."""

_STEPS = 24
"""The most placements between two corners."""


@dataclass(frozen=True, eq=False)
class Pair:
    """One use of a value, and the squares that it adds, by measure."""

    maker: str
    reader: str
    down: Mapping[str, float]
    up: Mapping[str, float]


class Part:
    """One graph, or one body, with its prices of time and its squares of errors.

    Attributes:
        name: which graph it is.
        record: the pass's record of the graph.
        runs: how often a call runs it.
        keys: the key of each op.
        own: node to the squares of being low, by measure.
        pairs: the uses of values that add squares.
        problem: the problem of least time.
    """

    def __init__(
        self, name: str, record: Rewritten, runs: float, found: Mapping[str, Squares]
    ) -> None:
        self.name, self.record, self.runs = name, record, runs
        self.keys = keys_of(record.classified)
        problem = _by_time_alone(record)
        known = {k for squares in found.values() for k in squares.known}
        self.own: dict[str, dict[str, float]] = {}
        pins: dict[str, str] = {}
        for node in problem.unary.keys() & self.keys.keys():
            key = self.keys[node]
            own = {m: s.own[key] for m, s in found.items() if key in s.own}
            self.own[node] = own
            if math.inf in own.values():
                pins[node] = _OVERFLOWS
            elif key not in known:
                pins[node] = _UNKNOWN
        self.pairs = [*self._pairs(problem, found)]
        at_sink = {**pins, **problem.at_sink}
        self.problem = dataclasses.replace(problem, at_sink=at_sink)

    def _pairs(self, problem: Problem, found: Mapping[str, Squares]) -> Iterator[Pair]:
        facts, known = self.record.facts, problem.unary
        for (name, value), edge in edges_of(self.record.classified, self.keys).items():
            maker, reader = facts.producer(value), name if edge.is_rounded else FP32
            if maker not in known or reader not in known or maker == reader:
                continue
            down = {m: s.down[edge] for m, s in found.items() if edge in s.down}
            up = {m: s.up[edge] for m, s in found.items() if edge in s.up}
            if down or up:
                yield Pair(maker, reader, down, up)

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

    def solved(
        self, rates: Mapping[str, float], kept: Iterable[str] = ()
    ) -> frozenset[str]:
        """The placement of least cost where squares of errors cost `rates` units each.

        Args:
            kept: nodes that stay fp32.
        """

        def price(squares: Mapping[str, float]) -> int:
            total = sum(rates.get(m, 0.0) * s for m, s in squares.items())
            return min(_MOST, round(total)) if total < math.inf else _MOST

        unary = dict(self.problem.unary)
        for name, squares in self.own.items():
            high, low = unary[name]
            unary[name] = (high, low + price(squares))
        roundings = [
            Group(("", -1, at), p.maker, (p.reader,), price(p.down), price(p.up))
            for at, p in enumerate(self.pairs)
        ]
        groups = [*self.problem.groups, *roundings]
        priced = dataclasses.replace(self.problem, unary=unary, groups=groups)
        return least_cost(held(priced, kept, low=False, why="makes an error"))[0]


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

    def fits(self, limits: Mapping[str, float], times: float) -> bool:
        """Whether each predicted error is at most `times` its limit."""
        return all(
            self.squares.get(m, 0.0) <= (times * limit) ** 2
            for m, limit in limits.items()
        )


class Scene:
    """All graphs of a model, placed together.

    Attributes:
        parts: the graphs and bodies.
        below_ceiling: whether ops that type promotion leaves fp32 may be low.
        weights: what the square of each measure's error counts in a share.
        nothing, everything: the placements with no op low, and with each that may be.
    """

    def __init__(
        self,
        records: Iterable[tuple[Rewritten, float]],
        found: Mapping[str, Squares],
        options: Options,
        *,
        below_ceiling: bool = False,
    ) -> None:
        """Makes the scene of the graphs of a model.

        Args:
            records: each graph, and how often a call runs it.
            found: the squares of each measure.
            options: the options of the conversion.
        """
        self.below_ceiling = below_ceiling
        self.weights: Mapping[str, float] = {}
        self.parts = []
        for number, (record, runs) in enumerate(records):
            for at, each in enumerate(record.with_bodies()):
                here = _without_ceiling(each, options) if below_ceiling else each
                self.parts.append(Part(f"{number}.{at}", here, runs, found))
        none: frozenset[str] = frozenset()
        self.nothing: Labels = {p.name: none for p in self.parts}
        self.everything: Labels = {
            p.name: project(p.problem, p.problem.unary) for p in self.parts
        }

    def squares(self, labels: Labels) -> dict[str, float]:
        """The square of the predicted error of one call, by measure."""
        found: dict[str, float] = {}
        for part in self.parts:
            _add(found, part.squares(labels[part.name]))
        return found

    def placement(self, labels: Labels) -> Found:
        """A placement with its predicted time and errors."""
        squares = self.squares(labels)
        share = sum(w * squares.get(m, 0.0) for m, w in self.weights.items())
        units = sum(part.units(labels[part.name]) for part in self.parts)
        return Found(labels, units * UNIT_NS, squares, share)

    def at(self, rate: float, kept: Mapping[str, Sequence[str]] | None = None) -> Found:
        """The placement of least cost, where a share of 1 costs `rate` nanoseconds.

        Args:
            kept: nodes of each part that stay fp32.
        """
        rates = {m: rate / UNIT_NS * w for m, w in self.weights.items()}
        kept = kept or {}
        return self.placement(
            {p.name: p.solved(rates, kept.get(p.name, ())) for p in self.parts}
        )

    def frontier(self, limits: Mapping[str, float]) -> list[Found]:
        """The placements, the most exact first, each faster than the one before.

        They are the corners of the lower hull of (error, time).  Eisner and Severance,
        "Mathematical techniques for efficient record segmentation in large shared
        databases" (1976).

        Args:
            limits: the largest error of each measure, which is its unit from now on.
        """
        self.weights = {m: 1 / limit**2 for m, limit in limits.items()}
        found = [self.placement(self.nothing), self.at(0.0)]
        todo = [(found[0], found[1])]
        while todo and len(found) < _CORNERS:
            a, b = todo.pop(0)
            if b.share <= a.share or b.nanoseconds >= a.nanoseconds:
                continue
            middle = self.at(_slope(a, b))
            worst = _cost(a, _slope(a, b))
            if _cost(middle, _slope(a, b)) < worst * (1 - 1e-9):
                found.append(middle)
                todo += [(a, middle), (middle, b)]
        return _pareto(found)

    def between(self, exact: Found, fast: Found) -> list[Found]:
        """Placements between two corners, with ops of the fast one in fp32.

        Each op goes to fp32 by itself; and one after the other, those first that make
        the largest errors by themselves.
        """
        kept: dict[str, list[str]] = {}
        moved = []
        for part in self.parts:
            allowed = filter(part.record.classified.is_allowed, sorted(part.own))
            kept[part.name] = []
            for name in allowed:
                if name not in fast.labels[part.name]:
                    kept[part.name].append(name)
                elif name not in exact.labels[part.name]:
                    moved.append((self._share(part.own[name]), part.name, name))
        found, start = [exact, fast], {part: [*names] for part, names in kept.items()}
        for _, part_name, name in sorted(moved, reverse=True)[:_STEPS]:
            alone = {**start, part_name: [*start[part_name], name]}
            kept[part_name].append(name)
            found += [self.at(0.0, alone), self.at(0.0, kept)]
        found = _pareto(found)
        return found[found.index(exact) + 1 : found.index(fast)]

    def _share(self, squares: Mapping[str, float]) -> float:
        return sum(w * squares.get(m, 0.0) for m, w in self.weights.items())

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


def _without_ceiling(record: Rewritten, options: Options) -> Rewritten:
    """The record of the same graph, in which the ceiling pins no op."""
    chosen = Chosen(frozenset(), frozenset(), below_ceiling=True)
    options = dataclasses.replace(options, chosen=chosen)
    return placed_again(record, options, record.given_up)


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
    return build_problem(record.classified, prices)


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for measure, square in more.items():
        total[measure] = total.get(measure, 0.0) + square


def _cost(found: Found, rate: float) -> float:
    return found.nanoseconds + (rate * found.share if rate else 0.0)


def _slope(exact: Found, fast: Found) -> float:
    """The nanoseconds that a share of error costs between two placements."""
    more = fast.share - exact.share
    return (exact.nanoseconds - fast.nanoseconds) / (more if more < math.inf else 1e6)


def _pareto(found: Iterable[Found]) -> list[Found]:
    """The placements that no other beats in time and error, the most exact first."""
    kept: list[Found] = []
    for each in sorted(found, key=lambda f: (f.share, f.nanoseconds)):
        if not kept or each.nanoseconds < kept[-1].nanoseconds:
            kept.append(each)
    return kept
