"""Decides the precision of every node of a classified graph by its prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoamp.errors import PlacementError
from autoamp.passes.decide.cost import Prices
from autoamp.passes.decide.mincut import Problem, energy
from autoamp.passes.decide.policies import POLICIES, project
from autoamp.passes.decide.problem import build_problem, least_cost, returned_and_used
from autoamp.passes.decide.verdict import AUTHOR, Classified, Verdict
from autoamp.passes.rules import Category

COSTS_CASTS = "going low would cost more casts than it saves"
GAINS_NOTHING = "predicted to gain nothing here"
"""Why an op that may be low is fp32: for its neighbours' sake, or for its own."""


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
) -> Assignment:
    """The assignment of the chosen `placement` for one graph.

    Raises:
        PlacementError: the constraints contradict each other.
    """
    problem = build_problem(classified, prices, as_asked=placement != "optimal")
    # Solved for any placement: reports tell what it costs above the least.
    low, optimal_cost = least_cost(problem)
    if placement != "optimal":
        low = project(problem, POLICIES[placement](classified))
    return Assignment(
        decisions=_decisions(classified, low, problem, prices.reward > 0),
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
) -> dict[str, Decision]:
    pins = problem.at_sink
    decisions = {}
    for name, verdict in classified.verdicts.items():
        fact = classified.facts.nodes[name]
        decisions[name] = Decision(
            name=name,
            op=fact.op,
            category=verdict.category,
            low=name in low,
            # The problem pins nodes that no verdict pins: makers of returned tensors
            # that share memory.
            reason=verdict.reason if verdict.pinned else pins.get(name, verdict.reason),
            choice=_choice(verdict, name in low, name in pins, rewarded),
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
    if verdict.asked and low:
        return f"its {'author' if verdict.origin == AUTHOR else 'body'} asks for it"
    if verdict.category is not Category.ALLOW:
        return "its neighbours are low" if low else COSTS_CASTS
    if not low:
        return GAINS_NOTHING
    if rewarded:
        return "without do-no-harm it is converted wherever it may be"
    return "predicted to gain more than its casts cost"
