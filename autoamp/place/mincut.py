"""The placement problem on plain names and integers, solved exactly as a min-cut.

Every variable is labelled low or high.  The total to minimise is

    sum of unary costs
  + for each cast group, `down` once if its value is high and any reader is low
  + for each cast group, `up` once if its value is low and any reader is high

A cast is shared: one serves all readers of its group.  The sum is submodular, hence an
s-t min-cut: source side = low, sink side = high, an edge a -> b of capacity w costs w
when a is low and b is high.  Constraints are edges of capacity "more than everything".
The gadgets follow Kolmogorov and Zabih, "What energy functions can be minimized via
graph cuts?" (2004), with one auxiliary node per group and direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from autoamp.errors import PlacementError

_LOW, _HIGH = "<low>", "<high>"


@dataclass(frozen=True)
class CastGroup:
    """Readers of one value that could share a cast of it.

    Attributes:
        name: unique name of the group.
        value: the variable that decides the value's precision.
        readers: variables that read it at their own precision.
        down: cost of one cast to low; None forbids it.
        up: cost of one cast to high; None forbids it.
        source: the value that is cast: `value`, or one of its several results.
    """

    name: str
    value: str
    readers: tuple[str, ...]
    down: int | None
    up: int | None
    source: str = ""


@dataclass(frozen=True)
class Problem:
    """A placement problem; costs are non-negative integers of any one unit.

    Attributes:
        unary: variable to its cost when high and its cost when low.
        pinned_high, pinned_low: variable to the reason it must be high, or low.
        groups: the possible casts.
        ties: pairs of variables that must be equal, with the reason.
        follows: (reader, value, reason): the reader may be low only if the value is.
    """

    unary: Mapping[str, tuple[int, int]]
    pinned_high: Mapping[str, str] = field(default_factory=dict)
    pinned_low: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[CastGroup] = ()
    ties: Sequence[tuple[str, str, str]] = ()
    follows: Sequence[tuple[str, str, str]] = ()


@dataclass(frozen=True)
class Solution:
    """The variables that are low, and the least total cost, which is exact."""

    low: frozenset[str]
    cost: int


def energy(problem: Problem, low: frozenset[str]) -> int | None:
    """The cost of a labelling, or None where it breaks a constraint."""
    if low & problem.pinned_high.keys() or problem.pinned_low.keys() - low:
        return None
    if any((a in low) != (b in low) for a, b, _ in problem.ties):
        return None
    if any(a in low and b not in low for a, b, _ in problem.follows):
        return None
    total = sum(costs[v in low] for v, costs in problem.unary.items())
    for group in problem.groups:
        if group.value in low:
            cost, needed = group.up, any(r not in low for r in group.readers)
        else:
            cost, needed = group.down, any(r in low for r in group.readers)
        if needed:
            if cost is None:
                return None
            total += cost
    return total


def solve(problem: Problem) -> Solution:
    """The labelling of least cost; of several, the one with the fewest low variables.

    Raises:
        PlacementError: the constraints contradict each other; the message is the chain
            of variables from one that must be low to one that must be high.
    """
    network = _Network(problem)
    network.settle()
    if network.constant >= network.never:
        raise PlacementError(_contradiction(problem))
    low, flow = network.cut()
    cost = network.constant + flow
    if cost >= network.never:
        raise PlacementError(_contradiction(problem))
    return Solution(frozenset(v for v in problem.unary if v in low), cost)


class _Network:
    """The flow network of a problem; its least cut plus `constant` is the least cost.

    `out[a][b]` and `into[b][a]` are the capacity of edge a -> b between variables;
    `source[v]` and `sink[v]` are the capacities of v's edges to the two terminals.
    """

    def __init__(self, problem: Problem) -> None:
        self.constant = 0
        self.source: dict[str, int] = {}
        self.sink: dict[str, int] = {}
        self.out: dict[str, dict[str, int]] = {}
        self.into: dict[str, dict[str, int]] = {}
        self.settled_low: set[str] = set()
        total = sum(sum(costs) for costs in problem.unary.values())
        total += sum((g.down or 0) + (g.up or 0) for g in problem.groups)
        # `never` is finite, so that a contradiction shows as a cut of at least `never`.
        self.never = total + 1
        for variable, (high, low) in problem.unary.items():
            base = min(high, low)
            self.constant += base
            self._variable(variable)
            self.source[variable] += high - base
            self.sink[variable] += low - base
        for variable in problem.pinned_high:
            self._variable(variable)
            self.sink[variable] += self.never
        for variable in problem.pinned_low:
            self._variable(variable)
            self.source[variable] += self.never
        for a, b, _ in problem.ties:
            self._edge(a, b, self.never)
            self._edge(b, a, self.never)
        for reader, value, _ in problem.follows:
            self._edge(reader, value, self.never)
        for group in problem.groups:
            self._cast(group, "low", self.never if group.down is None else group.down)
            self._cast(group, "high", self.never if group.up is None else group.up)

    def _variable(self, name: str) -> None:
        if name not in self.out:
            self.source[name] = self.sink[name] = 0
            self.out[name], self.into[name] = {}, {}

    def _edge(self, a: str, b: str, capacity: int) -> None:
        if capacity <= 0 or a == b:
            return
        self._variable(a)
        self._variable(b)
        capacity = min(capacity + self.out[a].get(b, 0), self.never)
        self.out[a][b] = self.into[b][a] = capacity

    def _cast(self, group: CastGroup, to: str, cost: int) -> None:
        """A reader on one side pays for a copy of a value on the other side."""
        if cost <= 0:
            return
        copy = f"<{to} copy of {group.name}>"
        shared = len(group.readers) > 1
        for reader in group.readers:
            end = copy if shared else group.value
            capacity = self.never if shared else cost
            self._edge(*((reader, end) if to == "low" else (end, reader)), capacity)
        if shared:
            ends = (copy, group.value) if to == "low" else (group.value, copy)
            self._edge(*ends, cost)

    def settle(self) -> None:
        """Decides each variable whose edge to one terminal outweighs its other edges.

        If the edge from the source to v is dearer than all edges that leave v, no least
        cut separates v from the source; the same holds for the sink.  Contracting v
        leaves the least cut's value and the smallest source side unchanged, and most
        variables of real models go this way, so the flow code sees a small network.
        """
        work = list(self.out)
        while work:
            v = work.pop()
            if v not in self.out:
                continue
            leaving = self.sink[v] + sum(self.out[v].values())
            entering = self.source[v] + sum(self.into[v].values())
            if self.source[v] > leaving:
                work.extend(self._contract(v, low=True))
            elif self.sink[v] >= entering:
                work.extend(self._contract(v, low=False))

    def _contract(self, v: str, *, low: bool) -> list[str]:
        out, into = self.out.pop(v), self.into.pop(v)
        for other in out:
            del self.into[other][v]
        for other in into:
            del self.out[other][v]
        if low:
            self.settled_low.add(v)
            self.constant += self.sink[v]
            for other, capacity in out.items():
                self.source[other] += capacity
        else:
            self.constant += self.source[v]
            for other, capacity in into.items():
                self.sink[other] += capacity
        return [*out, *into]

    def cut(self) -> tuple[set[str], int]:
        """The low variables, and the least cut's value over the unsettled ones."""
        graph = nx.DiGraph()
        graph.add_nodes_from((_LOW, _HIGH))
        constant = 0
        for v, out in self.out.items():
            through = min(self.source[v], self.sink[v])
            constant += through
            if self.source[v] > through:
                graph.add_edge(_LOW, v, capacity=self.source[v] - through)
            if self.sink[v] > through:
                graph.add_edge(v, _HIGH, capacity=self.sink[v] - through)
            graph.add_edges_from((v, to, {"capacity": c}) for to, c in out.items())
        residual = boykov_kolmogorov(graph, _LOW, _HIGH)
        reached, frontier = {_LOW}, [_LOW]
        while frontier:
            for to, edge in residual[frontier.pop()].items():
                if to not in reached and edge["capacity"] > edge["flow"]:
                    reached.add(to)
                    frontier.append(to)
        flow = int(residual.graph["flow_value"])
        return self.settled_low | reached, constant + flow


def _contradiction(problem: Problem) -> str:
    """The chain of constraints from a variable pinned low to one pinned high."""
    forced = nx.DiGraph()
    for a, b, why in problem.ties:
        forced.add_edge(a, b, why=why)
        forced.add_edge(b, a, why=why)
    for reader, value, why in problem.follows:
        forced.add_edge(reader, value, why=why)
    for group in problem.groups:
        for reader in group.readers:
            if group.down is None:
                why = f"{group.value} must not be cast down"
                forced.add_edge(reader, group.value, why=why)
            if group.up is None:
                why = f"{group.value} must not be cast up"
                forced.add_edge(group.value, reader, why=why)
    for start, because in problem.pinned_low.items():
        for end, why_not in problem.pinned_high.items():
            if start == end:
                chain = [start]
            elif start in forced and end in forced and nx.has_path(forced, start, end):
                chain = nx.shortest_path(forced, start, end)
            else:
                continue
            steps = [f"{b} as well ({forced[a][b]['why']})" for a, b in pairwise(chain)]
            middle = "; then " + "; then ".join(steps) if steps else ""
            return (
                f"contradictory constraints: {start} must be low ({because}){middle}; "
                f"but {end} must stay fp32 ({why_not}). Drop one of the two."
            )
    return "contradictory constraints: no legal placement exists"
