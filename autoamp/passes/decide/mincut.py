"""Problems of two sides with shared copies, and their exact solution by a min-cut.

Every variable stands on the source side or on the sink side; the caller decides what
the sides mean (`passes/decide/problem.py`: low and fp32).  The total to minimise is

    sum of unary costs
  + for each group, `to_source` once if its value is on the sink side and any reader is
    on the source side
  + for each group, `to_sink` once in the opposite case; or `made`, if the group has
    such a price and all its readers are on the sink side
  + for each share, `at_source` once if any member is on the source side, and `at_sink`
    once if any is on the sink side

A copy is shared: one serves all readers of its group.  A group of one reader is a cost
of that reader standing on another side than the value.  A value that no reader wants on
the source side needs no copy where its maker can make it for the sink side at once.

The total is submodular, hence an s-t min-cut: an edge a -> b of capacity w costs w when
a is on the source side and b on the sink side.  Constraints are edges of capacity "more
than everything".  The gadgets follow Kolmogorov and Zabih, "What energy functions can
be minimized via graph cuts?" (2004), with one auxiliary node per group and direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov


@dataclass(frozen=True)
class Group:
    """Readers of one value that could share a copy of it.

    Attributes:
        key: the name of the value that is copied, and two numbers that tell the groups
            of one value apart.
        value: the variable that decides the value's side.
        readers: variables that read the value on their own side.
        to_source: cost of one copy to the source side; None forbids it.
        to_sink: cost of one copy to the sink side; None forbids it.
        why: the reason why a copy is forbidden.
        made: cost of making the value for the sink side, in the place of `to_sink`
            where all readers are there; between `to_sink - to_source` and `to_sink`.
            None where it cannot be made so, or a copy is forbidden.
    """

    key: tuple[str, int, int]
    value: str
    readers: tuple[str, ...]
    to_source: int | None
    to_sink: int | None
    why: str = "the value must not be copied"
    made: int | None = None

    def cost(self, is_source: Callable[[str], bool]) -> int | None:
        """The cost of the copy that a labelling needs; None if it is forbidden."""
        wanted = {is_source(reader) for reader in self.readers}
        if wanted <= {is_source(self.value)}:
            return 0
        if not is_source(self.value):
            return self.to_source
        return self.to_sink if True in wanted or self.made is None else self.made


@dataclass(frozen=True)
class Share:
    """What the members of one side need together, once for all of them.

    Attributes:
        members: variables.
        at_source, at_sink: the cost as soon as one member is on that side.
    """

    members: tuple[str, ...]
    at_source: int
    at_sink: int

    def cost(self, is_source: Callable[[str], bool]) -> int:
        """The cost in a labelling."""
        there = {is_source(member) for member in self.members}
        return self.at_source * (True in there) + self.at_sink * (False in there)


@dataclass(frozen=True)
class Problem:
    """A problem of two sides; costs are non-negative integers of any one unit.

    Attributes:
        unary: variable to its cost on the sink side and its cost on the source side.
        at_sink, at_source: variable to the reason why it must stand on that side.
        groups: the possible copies.
        ties: pairs of variables that must stand on one side, with the reason.
        follows: (reader, value, reason): the reader may stand on the source side only
            if the value does.
        shares: costs that several variables have together.
    """

    unary: Mapping[str, tuple[int, int]]
    at_sink: Mapping[str, str] = field(default_factory=dict)
    at_source: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    ties: Sequence[tuple[str, str, str]] = ()
    follows: Sequence[tuple[str, str, str]] = ()
    shares: Sequence[Share] = ()


@dataclass(frozen=True)
class Solution:
    """The variables on the source side, and the least total cost, which is exact."""

    source: frozenset[str]
    cost: int


def energy(problem: Problem, source: frozenset[str]) -> int | None:
    """The cost of having the variables `source` on the source side.

    The result is None where a constraint is broken.
    """
    if source & problem.at_sink.keys() or problem.at_source.keys() - source:
        return None
    # A tie is two edges, a follower one: see `Network`, which says the same as a cut.
    if any((a in source) != (b in source) for a, b, _ in problem.ties):
        return None
    if any(a in source and b not in source for a, b, _ in problem.follows):
        return None
    total = sum(costs[v in source] for v, costs in problem.unary.items())
    for group in problem.groups:
        cost = group.cost(source.__contains__)
        if cost is None:
            return None
        total += cost
    return total + sum(each.cost(source.__contains__) for each in problem.shares)


# -- the solver ------------------------------------------------------------------------

Node = str | tuple[str, int]
"""A variable; or an auxiliary node, which is the copy to a side for a numbered group,
or the side of a numbered share; or a terminal."""

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
    solution = network.solution(problem.unary)
    if solution is None:
        raise contradiction(problem)
    return solution


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
        total += sum(each.at_source + each.at_sink for each in problem.shares)
        # `never` is finite, so that a contradiction shows as a cut of at least `never`.
        self.never = total + 1
        for variable, (at_sink, at_source) in problem.unary.items():
            # The smaller price is paid on either side, so that only the rest is a
            # capacity.
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
        for number, group in enumerate(problem.groups):
            if group.made is not None:
                self._made(group, number, group.made)
                continue
            self._copy(group, ("source", number), group.to_source)
            self._copy(group, ("sink", number), group.to_sink)
        for number, share in enumerate(problem.shares):
            self._share(share, number)

    def _node(self, v: Node) -> None:
        if v not in self.out:
            self.source[v] = self.sink[v] = 0
            self.out[v], self.into[v] = {}, {}

    def _edge(self, a: Node, b: Node, capacity: int) -> None:
        if capacity <= 0 or a == b:
            return
        self._node(a)
        self._node(b)
        # Parallel edges add up; more than `never` says no more than `never`.
        capacity = min(capacity + self.out[a].get(b, 0), self.never)
        self.out[a][b] = self.into[b][a] = capacity

    def _copy(self, group: Group, to: tuple[str, int], price: int | None) -> None:
        """Adds the edges by which readers on the other side pay for a copy."""
        cost = self.never if price is None else price
        pairs: list[tuple[Node, Node, int]] = [
            (r, group.value, cost) for r in group.readers
        ]
        # Each reader draws the auxiliary node to its side at any price, and that node
        # alone pays for the copy, once.
        if len(pairs) > 1 and cost > 0:
            pairs = [(r, to, self.never) for r in group.readers]
            pairs.append((to, group.value, cost))
        for a, b, capacity in pairs:
            self._edge(*((a, b) if to[0] == "source" else (b, a)), capacity)

    def _made(self, group: Group, number: int, made: int) -> None:
        """Adds the edges of a group whose value can be made for the sink side."""
        assert group.to_source is not None
        assert group.to_sink is not None
        # The edges without end make `some_source` follow any reader to the source side,
        # and `some_sink` any reader, or the value, to the sink side.  What is cut is:
        #
        #     value    readers       edges that are cut                     price
        #     source   all source    none                                   0
        #     source   all sink      value -> some_sink                     made
        #     source   on both       that, some_source -> some_sink         to_sink
        #     sink     all sink      none                                   0
        #     sink     any source    some_source -> value, -> some_sink     to_source
        #
        # No capacity is negative within the bounds of `Group.made`.
        some_source, some_sink = ("source", number), ("sink", number)
        more = group.to_sink - made
        self._edge(group.value, some_sink, made)
        self._edge(some_source, some_sink, more)
        self._edge(some_source, group.value, group.to_source - more)
        self._edge(some_sink, group.value, self.never)
        for reader in group.readers:
            self._edge(reader, some_source, self.never)
            self._edge(some_sink, reader, self.never)

    def _share(self, share: Share, number: int) -> None:
        """Adds the edges by which the members of a side pay once for all of them."""
        # A single member pays by itself; several draw an auxiliary node to their side
        # at any price, and that node pays.
        alone = len(share.members) == 1
        low = share.members[0] if alone else ("any source", number)
        high = share.members[0] if alone else ("any sink", number)
        for node in (low, high):
            self._node(node)
        self.sink[low] += share.at_source
        self.source[high] += share.at_sink
        for member in () if alone else share.members:
            self._edge(member, low, self.never)
            self._edge(high, member, self.never)

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
        # A node that constraints pull to both sides may have been contracted: then the
        # contradiction stands in the constant, and no flow is needed.
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
            # `>` here and `>=` below: at equal cost a node goes to the sink, so that
            # the source side stays the smallest.
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
        # What crosses for certain now is the edge to the other terminal.
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
            # This much flows from terminal to terminal through v alone, and is always
            # cut.
            through = min(self.source[v], self.sink[v])
            constant += through
            if self.source[v] > through:
                graph.add_edge(_SOURCE, v, capacity=self.source[v] - through)
            if self.sink[v] > through:
                graph.add_edge(v, _SINK, capacity=self.sink[v] - through)
            graph.add_edges_from((v, to, {"capacity": c}) for to, c in out.items())
        # 8,800 ops took 0.23 s with this algorithm of networkx's, and 72 s with
        # `dinitz`.
        residual = boykov_kolmogorov(graph, _SOURCE, _SINK)
        # What the source reaches over unsaturated edges is the smallest source side.
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
            # The shortest of the chains, as a person has to read it.
            path = nx.shortest_path(forced, start, end)
            steps = [(b, forced[a][b]["why"]) for a, b in pairwise(path)]
            first = (start, problem.at_source[start])
            return ContradictionError([first, *steps, (end, problem.at_sink[end])])
    return ContradictionError(())
