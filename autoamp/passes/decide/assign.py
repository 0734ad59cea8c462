"""Decides the precision of every node of a classified graph by its prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autoamp.errors import PlacementError
from autoamp.passes.decide.cost import Prices
from autoamp.passes.decide.mincut import Problem, energy
from autoamp.passes.decide.policies import POLICIES, project
from autoamp.passes.decide.problem import build_problem, least_cost, returned_and_used
from autoamp.passes.decide.verdict import Classified, Verdict
from autoamp.passes.rules import Category

COSTS_CASTS = "going low would cost more casts than it saves"
GAINS_NOTHING = "predicted to gain nothing here"
"""Why an op that may be low is fp32: for its neighbours' sake, or for its own."""


class OpKey(NamedTuple):
    """One op of a model, known again in another capture, whose nodes have other names.

    Attributes:
        module: the module path.
        op: the op without its overload ("aten::linear").
        number: how many equal ops of the module stand before it in the graph.
    """

    module: str
    op: str
    number: int


@dataclass(frozen=True)
class Chosen:
    """The ops that are to be low, of all ops that a choice was made for.

    Attributes:
        low: the ops that are low wherever that is legal.
        known: the ops that the choice was made for; any other op stays fp32.
        below_ceiling: whether ops that type promotion leaves fp32 may be low.
        reasons: why an op that may be low is fp32, or why it is low; a sentence.
        frontier: what the choice was made from, for the report.  It counts when choices
            are compared: a record of a graph holds it, and conversions with equal
            options share records.
    """

    low: frozenset[OpKey]
    known: frozenset[OpKey]
    below_ceiling: bool = False
    # A mapping has no hash, and options, which hold a choice, are keys of a cache.
    reasons: Mapping[OpKey, str] = field(default_factory=dict, hash=False)
    frontier: Any = field(default=None, hash=False)

    def nodes(self, classified: Classified) -> frozenset[str]:
        """The nodes of a graph that are to be low."""
        keys = keys_of(classified)
        return frozenset(name for name, key in keys.items() if key in self.low)

    def reason(self, key: OpKey) -> str:
        """Why an op is low, or is fp32."""
        if key in self.reasons:
            return self.reasons[key]
        if key in self.known:
            return ""
        return (
            "no batch of calibrate_on= ran it, or no derivative reaches it: its error "
            "is not known"
        )


def keys_of(classified: Classified) -> dict[str, OpKey]:
    """The key of each op of a graph, by the name of its node."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for name in classified.verdicts:
        fact = classified.facts.nodes[name]
        place = fact.module, fact.base
        found[name] = OpKey(*place, seen[place])
        seen[place] += 1
    return found


@dataclass(frozen=True)
class Decision:
    """The precision of one node, and why.

    Attributes:
        name, op: the node and its op ("aten::linear.default").
        category: allow, deny, infer or clear.
        low: whether the node computes in the low dtype.
        reason: why the op is in that category, or must stay fp32: a sentence.
        choice: why a free node is low or is fp32; "" for a pinned node.
        origin: the rules file, user list or part of the pass behind the reason.
        module, source: where the user wrote the node's call.
        listed: whether any rule knows the op.
    """

    name: str
    op: str
    category: Category
    low: bool
    reason: str
    choice: str
    origin: str
    module: str
    source: str
    listed: bool


@dataclass(frozen=True)
class Assignment:
    """The decisions on a whole graph, immutable, with their cost.

    Attributes:
        decisions: node to decision, in graph order.
        low: the nodes that compute in the low dtype.
        cost: the total of ops and casts under `prices`, which a recount over the
            emitted graph must equal; for the optimal placement, the min-cut's value.
        optimal_cost: the least total of any legal placement.
        all_high_cost: the total with everything in fp32.
        returned_inside: values both returned and used inside, whose inner readers must
            hang on the returned tensor.
        problem, prices: the inputs of the decisions.
    """

    decisions: Mapping[str, Decision]
    low: frozenset[str]
    cost: int
    optimal_cost: int
    all_high_cost: int
    returned_inside: frozenset[str]
    problem: Problem
    prices: Prices

    @property
    def pinned(self) -> Mapping[str, str]:
        """Each node and value that must be fp32, to the reason."""
        return self.problem.at_sink


def assign(
    classified: Classified,
    prices: Prices,
    placement: str,
    chosen: Chosen | None = None,
) -> Assignment:
    """The assignment of the chosen `placement` for one graph.

    Args:
        chosen: a choice made before, which goes before `placement`.

    Raises:
        PlacementError: the constraints contradict each other.
    """
    problem = build_problem(classified, prices, as_asked=placement != "optimal")
    # Solved for any placement: reports tell what it costs above the least.
    low, optimal_cost = least_cost(problem)
    if chosen is not None:
        # The choice was made on another capture, whose constraints may be others.
        low = project(problem, chosen.nodes(classified))
    elif placement != "optimal":
        low = project(problem, POLICIES[placement](classified))
    return Assignment(
        decisions=_decisions(classified, low, problem, prices.reward > 0, chosen),
        low=low,
        cost=legal_energy(problem, low),
        optimal_cost=optimal_cost,
        all_high_cost=legal_energy(problem, frozenset()),
        returned_inside=returned_and_used(classified),
        problem=problem,
        prices=prices,
    )


def legal_energy(problem: Problem, low: frozenset[str]) -> int:
    """The cost of a labelling that breaks no constraint.

    Raises:
        PlacementError: the labelling breaks a constraint.
    """
    cost = energy(problem, low)
    if cost is None:
        raise PlacementError(
            "a placement broke its own constraints; this is a bug in autoamp, please "
            f"report it with the graph (low nodes: {', '.join(sorted(low)[:8])} ...)",
            nodes=sorted(low - project(problem, low)),
        )
    return cost


def _decisions(
    classified: Classified,
    low: frozenset[str],
    problem: Problem,
    rewarded: bool,
    chosen: Chosen | None,
) -> dict[str, Decision]:
    pins = problem.at_sink
    keys = {} if chosen is None else keys_of(classified)
    decisions = {}
    for name, verdict in classified.verdicts.items():
        fact = classified.facts.nodes[name]
        choice = _choice(verdict, name in low, name in pins, rewarded)
        if chosen is not None and choice:
            choice = chosen.reason(keys[name]) or choice
        decisions[name] = Decision(
            name=name,
            op=fact.op,
            category=verdict.category,
            low=name in low,
            # The problem pins nodes that no verdict pins: makers of returned tensors
            # that share memory.
            reason=verdict.reason if verdict.pinned else pins.get(name, verdict.reason),
            choice=choice,
            origin=verdict.origin,
            module=fact.module,
            source=fact.source,
            listed=verdict.listed,
        )
    return decisions


def _choice(verdict: Verdict, low: bool, pinned: bool, rewarded: bool) -> str:
    """Why a free node is low or is fp32; "" for a pinned node."""
    if pinned:
        return ""
    if verdict.category is not Category.ALLOW:
        return "its neighbours are low" if low else COSTS_CASTS
    if not low:
        return GAINS_NOTHING
    if verdict.asked:
        return "its author asks for it"
    if rewarded:
        return "without do-no-harm it is converted wherever it may be"
    return "predicted to gain more than its casts cost"
