"""Decides the precision of every node of a classified graph by its prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoamp.errors import PlacementError
from autoamp.passes.decide.ceiling import low_under_autocast
from autoamp.passes.decide.cost import Prices
from autoamp.passes.decide.kept_values import kept_bytes
from autoamp.passes.decide.memory import weighed, within
from autoamp.passes.decide.mincut import Problem, energy
from autoamp.passes.decide.policies import POLICIES, project
from autoamp.passes.decide.problem import (
    build_problem,
    least_cost,
    returned_and_used,
)
from autoamp.passes.decide.verdict import AUTHOR, Classified, Verdict
from autoamp.passes.rules import Category

COSTS_CASTS = "going low would cost more casts than it saves"
GAINS_NOTHING = "predicted to gain nothing here"
"""Why an op that may be low is fp32: for its neighbours' sake, or for its own."""

KEEPS_LESS = "so placed that less is kept for the backward"
"""Why an op is not as in the fastest placement."""


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
            emitted graph must equal.
        optimal_cost: the least total of any legal placement; the optimal one may cost
            more, to keep fewer bytes for the backward.
        all_high_cost: the total with everything in fp32.
        returned_inside: values both returned and used inside, whose inner readers must
            hang on the returned tensor.
        problem, prices: the inputs of the decisions.
        solved: `problem`, with the price on bytes that the optimal placement pays.
    """

    decisions: Mapping[str, Decision]
    low: frozenset[str]
    cost: int
    optimal_cost: int
    all_high_cost: int
    returned_inside: frozenset[str]
    problem: Problem
    solved: Problem
    prices: Prices

    @property
    def kept(self) -> int:
        """The bytes kept for the backward."""
        return kept_bytes(self.prices.kept, self.low)

    @property
    def pinned(self) -> Mapping[str, str]:
        """Each node and value that must be fp32, to the reason."""
        return self.problem.at_sink


def assign(
    classified: Classified,
    prices: Prices,
    placement: str,
    objective: str = "time",
    gained: int = 0,
) -> Assignment:
    """The assignment of the chosen `placement` for one graph.

    Args:
        objective: "time", or "memory" for the placement that keeps the fewest bytes for
            the backward, and of several the fastest.
        gained: the time that the bodies of the graph gain over fp32, which the graph
            round them may spend to keep less.

    Raises:
        PlacementError: the constraints contradict each other.
    """
    problem = build_problem(classified, prices, as_asked=placement != "optimal")
    # Solved for any placement: reports tell what it costs above the least.
    fastest, optimal_cost = least_cost(problem)
    all_high_cost = legal_energy(problem, frozenset())
    solved, low = problem, fastest
    if placement != "optimal":
        low = fastest = project(problem, POLICIES[placement](classified))
    elif prices.kept:
        if objective == "memory":
            solved = weighed(problem, prices.kept, prices.byte)
        else:
            limit = kept_bytes(prices.kept, low_under_autocast(classified))
            slowest = all_high_cost + gained
            kept, byte = prices.kept, prices.byte
            solved = within(problem, kept, fastest, limit, slowest, byte)
        if solved is not problem:
            low, _ = least_cost(solved)
    return Assignment(
        decisions=_decisions(classified, low, fastest, problem, prices.reward > 0),
        low=low,
        cost=legal_energy(problem, low),
        optimal_cost=optimal_cost,
        all_high_cost=all_high_cost,
        returned_inside=returned_and_used(classified),
        problem=problem,
        solved=solved,
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
    fastest: frozenset[str],
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
            choice=KEEPS_LESS
            if (name in low) != (name in fastest)
            else _choice(verdict, name in low, name in pins, rewarded),
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
