"""Solves problems of two sides (`place/two_sides.py`) exactly, as a min-cut.

The total is submodular, hence an s-t min-cut: an edge a -> b of capacity w costs w when
a is on the source side and b on the sink side.  Constraints are edges of capacity "more
than everything".  The gadgets follow Kolmogorov and Zabih, "What energy functions can
be minimized via graph cuts?" (2004), with one auxiliary node per group and direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from autoamp.place.two_sides import Group, Problem, Solution

Node = str | tuple[str, int]
"""A variable; or an auxiliary node, which is the copy to a side for a numbered group;
or a terminal."""

_SOURCE: Node = ("source", -1)
_SINK: Node = ("sink", -1)


class ContradictionError(Exception):
    """The constraints of a problem contradict each other.

    Attributes:
        chain: variables with reasons: one that must stand on the source side, those
            that must follow it there, and last the same variable again with the reason
            why it must stand on the sink side; empty where no chain explains it.
    """

    def __init__(self, chain: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{name} ({why})" for name, why in chain))
        self.chain = tuple(chain)


def solve(problem: Problem) -> Solution:
    """The solution of least cost; of several, the one with the smallest source side.

    Raises:
        ContradictionError: the constraints contradict each other.
    """
    network = Network(problem)
    found = network.solution(problem.unary)
    if found is None:
        raise contradiction(problem)
    return found


class Network:
    """The flow network of a problem; its least cut plus `constant` is the least cost.

    `out[a][b]` and `into[b][a]` are the capacity of edge a -> b between nodes;
    `source[v]` and `sink[v]` are the capacities of v's edges to the two terminals.
    """

    def __init__(self, problem: Problem) -> None:
        self.constant = 0
        self.source: dict[Node, int] = {}
        self.sink: dict[Node, int] = {}
        self.out: dict[Node, dict[Node, int]] = {}
        self.into: dict[Node, dict[Node, int]] = {}
        self.settled: set[Node] = set()
        total = sum(sum(costs) for costs in problem.unary.values())
        total += sum((g.to_source or 0) + (g.to_sink or 0) for g in problem.groups)
        total += sum(c.to_source + c.to_sink for c in problem.crossings)
        # `never` is finite, so that a contradiction shows as a cut of at least `never`.
        self.never = total + 1
        for variable, (at_sink, at_source) in problem.unary.items():
            base = min(at_sink, at_source)
            self.constant += base
            self._node(variable)
            self.source[variable] += at_sink - base
            self.sink[variable] += at_source - base
        for variable in problem.at_sink:
            self._node(variable)
            self.sink[variable] += self.never
        for variable in problem.at_source:
            self._node(variable)
            self.source[variable] += self.never
        for a, b, _ in problem.ties:
            self._edge(a, b, self.never)
            self._edge(b, a, self.never)
        for reader, value, _ in problem.follows:
            self._edge(reader, value, self.never)
        for each in problem.crossings:
            self._edge(each.reader, each.value, each.to_source)
            self._edge(each.value, each.reader, each.to_sink)
        for number, group in enumerate(problem.groups):
            self._copy(group, ("source", number), group.to_source)
            self._copy(group, ("sink", number), group.to_sink)

    def _node(self, v: Node) -> None:
        if v not in self.out:
            self.source[v] = self.sink[v] = 0
            self.out[v], self.into[v] = {}, {}

    def _edge(self, a: Node, b: Node, capacity: int) -> None:
        if capacity <= 0 or a == b:
            return
        self._node(a)
        self._node(b)
        capacity = min(capacity + self.out[a].get(b, 0), self.never)
        self.out[a][b] = self.into[b][a] = capacity

    def _copy(self, group: Group, to: tuple[str, int], price: int | None) -> None:
        """A reader on one side pays for a copy of a value on the other side."""
        cost = self.never if price is None else price
        if cost <= 0:
            return
        to_source = to[0] == "source"
        shared = len(group.readers) > 1
        end: Node = to if shared else group.value
        capacity = self.never if shared else cost
        pairs: list[tuple[Node, Node, int]] = [
            (r, end, capacity) for r in group.readers
        ]
        if shared:
            pairs.append((to, group.value, cost))
        for a, b, capacity in pairs:
            self._edge(*((a, b) if to_source else (b, a)), capacity=capacity)

    def copy(self) -> Network:
        """A network that changes apart from this one."""
        other = copy(self)
        other.source, other.sink = dict(self.source), dict(self.sink)
        other.out = {v: dict(edges) for v, edges in self.out.items()}
        other.into = {v: dict(edges) for v, edges in self.into.items()}
        other.settled = set(self.settled)
        return other

    def solution(self, variables: Iterable[str]) -> Solution | None:
        """The solution of least cost, with the smallest source side; None if illegal.

        Nothing else may be asked of the network afterwards.
        """
        self.settle()
        if self.constant >= self.never:
            return None
        source, flow = self.cut()
        cost = self.constant + flow
        if cost >= self.never:
            return None
        return Solution(frozenset(v for v in variables if v in source), cost)

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
                work.extend(self.contract(v, to_source=True))
            elif self.sink[v] >= entering:
                work.extend(self.contract(v, to_source=False))

    def contract(self, v: Node, *, to_source: bool) -> list[Node]:
        """Puts a node on a side for good; returns the nodes that it had edges with."""
        out, into = self.out.pop(v), self.into.pop(v)
        for other in out:
            del self.into[other][v]
        for other in into:
            del self.out[other][v]
        if to_source:
            self.settled.add(v)
            self.constant += self.sink[v]
            for other, capacity in out.items():
                self.source[other] += capacity
        else:
            self.constant += self.source[v]
            for other, capacity in into.items():
                self.sink[other] += capacity
        return [*out, *into]

    def cut(self) -> tuple[set[Node], int]:
        """The source side, and the least cut's value over the unsettled nodes."""
        graph = nx.DiGraph()
        graph.add_nodes_from((_SOURCE, _SINK))
        constant = 0
        for v, out in self.out.items():
            through = min(self.source[v], self.sink[v])
            constant += through
            if self.source[v] > through:
                graph.add_edge(_SOURCE, v, capacity=self.source[v] - through)
            if self.sink[v] > through:
                graph.add_edge(v, _SINK, capacity=self.sink[v] - through)
            graph.add_edges_from((v, to, {"capacity": c}) for to, c in out.items())
        residual = boykov_kolmogorov(graph, _SOURCE, _SINK)
        reached, frontier = {_SOURCE}, [_SOURCE]
        while frontier:
            for to, edge in residual[frontier.pop()].items():
                if to not in reached and edge["capacity"] > edge["flow"]:
                    reached.add(to)
                    frontier.append(to)
        flow = int(residual.graph["flow_value"])
        return self.settled | reached, constant + flow


def contradiction(problem: Problem) -> ContradictionError:
    """The error of a problem that has no solution, with the chain of constraints."""
    forced = nx.DiGraph()
    forced.add_nodes_from([*problem.at_source, *problem.at_sink])
    for a, b, why in problem.ties:
        forced.add_edge(a, b, why=why)
        forced.add_edge(b, a, why=why)
    for reader, value, why in problem.follows:
        forced.add_edge(reader, value, why=why)
    for group in problem.groups:
        for reader in group.readers:
            if group.to_source is None:
                forced.add_edge(reader, group.value, why=group.why)
            if group.to_sink is None:
                forced.add_edge(group.value, reader, why=group.why)
    for start in problem.at_source:
        reached = nx.descendants(forced, start) | {start}
        end = next((v for v in problem.at_sink if v in reached), None)
        if end is not None:
            path = nx.shortest_path(forced, start, end)
            steps = [(b, forced[a][b]["why"]) for a, b in pairwise(path)]
            first = (start, problem.at_source[start])
            return ContradictionError([first, *steps, (end, problem.at_sink[end])])
    return ContradictionError(())


class Again:
    """Many answers about one problem, each the same as a whole solution would be.

    The total is submodular.  So if variables are held on the source side, the smallest
    least source side only grows; if they are held on the sink side, it only shrinks.
    The part that all answers share is contracted once, and each answer solves the small
    rest.
    """

    def __init__(self, problem: Problem) -> None:
        """Raises ContradictionError: the constraints of `problem` contradict."""
        self._problem = problem
        self._source = solve(problem).source

    def held(self, names: Iterable[str], *, at_source: bool) -> Solution | None:
        """The solution of least cost with variables held on one side; None if illegal.

        Of several, it is the one with the smallest source side.
        """
        network = (self._above if at_source else self._below).copy()
        weights = network.source if at_source else network.sink
        for name in names:
            if name in network.out:  # else the variable stands on that side already
                weights[name] += network.never
        return network.solution(self._problem.unary)

    @cached_property
    def _above(self) -> Network:
        """The network of the variables on the sink side, which may leave it."""
        network = Network(self._problem)
        for name in self._problem.unary:
            if name in self._source:
                network.contract(name, to_source=True)
        return network

    @cached_property
    def _below(self) -> Network:
        """The network of the variables on the source side."""
        network = Network(self._problem)
        for name in self._problem.unary:
            if name not in self._source:
                network.contract(name, to_source=False)
        return network
