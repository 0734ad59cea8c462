"""Decides the precision of every node.  Decides only: no graph is touched here."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autoamp.analyse.facts import FP32, Facts
from autoamp.analyse.verdict import Verdict
from autoamp.errors import PlacementError
from autoamp.place.cost import Prices
from autoamp.place.mincut import CastGroup, Problem, energy, solve
from autoamp.place.policies import POLICIES, project
from autoamp.rules import Category


@dataclass(frozen=True)
class Decision:
    """The precision of one node, and why.

    Attributes:
        name, op: the node and its op ("aten::linear.default").
        category: allow, deny, infer or clear.
        low: whether it computes in the low dtype.
        reason: why its op is in that category, or must stay fp32: a sentence.
        choice: why a node that was free went this way; "" for one that was not.
        origin: the rules file, user list or part of the pass behind the reason.
        module, source: where the user wrote it.
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
    """The whole map, immutable, with what it costs and what other policies would.

    Attributes:
        decisions: node to decision, in graph order.
        low: the nodes that compute in the low dtype.
        cost: the total of ops and casts under `prices`; for the optimal placement the
            value of the min-cut, to be equalled by a recount over the emitted graph.
        optimal_cost: the least total of any legal placement.
        all_high_cost: the total with everything in fp32.
        returned_inside: values both returned and used inside, whose inner readers must
            hang on the returned tensor.
        problem, prices, facts, verdicts: what was decided from.
    """

    decisions: Mapping[str, Decision]
    low: frozenset[str]
    cost: int
    optimal_cost: int
    all_high_cost: int
    returned_inside: frozenset[str]
    problem: Problem
    prices: Prices
    facts: Facts
    verdicts: Mapping[str, Verdict]

    @cached_property
    def policy_costs(self) -> Mapping[str, int]:
        """What TensorFlow's, autocast's promote and the forced policy would cost.

        Each is projected on the legal placements and priced alike.
        """
        return {
            name: _legal_energy(
                self.problem, project(self.problem, policy(self.facts, self.verdicts))
            )
            for name, policy in POLICIES.items()
        }


def assign(
    facts: Facts, verdicts: Mapping[str, Verdict], prices: Prices, placement: str
) -> Assignment:
    """The assignment of the chosen `placement` for one graph.

    Raises:
        PlacementError: the constraints contradict each other.
    """
    returned_inside = _returned_and_used(facts, verdicts)
    problem = build_problem(facts, verdicts, prices, returned_inside)
    best = solve(problem)
    low = best.low
    if placement != "optimal":
        low = project(problem, POLICIES[placement](facts, verdicts))
    return Assignment(
        decisions=_decisions(facts, verdicts, low, problem, prices.reward > 0),
        low=low,
        cost=_legal_energy(problem, low),
        optimal_cost=best.cost,
        all_high_cost=_legal_energy(problem, frozenset()),
        returned_inside=returned_inside,
        problem=problem,
        prices=prices,
        facts=facts,
        verdicts=verdicts,
    )


def build_problem(
    facts: Facts,
    verdicts: Mapping[str, Verdict],
    prices: Prices,
    returned_inside: frozenset[str],
) -> Problem:
    """The placement problem of a graph: unary prices, pins, casts, ties."""
    unary = dict(prices.ops)
    pinned = {n: v.reason for n, v in verdicts.items() if v.pinned}
    for name in facts.constants:
        unary[name] = (0, 0)
        pinned[name] = "comes from outside the graph in fp32"
    unary[FP32] = (0, 0)
    pinned[FP32] = "is read in fp32 outside the graph"
    why = "is returned, or viewed by what is, and shares memory with another tensor"
    pinned |= dict.fromkeys(_returned_aliases(facts), why)
    groups, follows = _casts(facts, verdicts, prices, returned_inside)
    return Problem(
        unary=unary,
        pinned_high={n: why for n, why in pinned.items() if n in unary},
        groups=groups,
        ties=_ties(facts, unary),
        follows=follows,
    )


def promised_casts(problem: Problem, low: frozenset[str]) -> Counter[tuple[str, str]]:
    """How many casts of each value labelling `low` needs: by (value, "down" or "up").

    In graph order; the recount over the emitted graph must find the same.
    """
    needed: Counter[tuple[str, str]] = Counter()
    for group in problem.groups:
        value = group.name.rpartition(" in region ")[0]
        if group.value in low:
            if any(r not in low for r in group.readers):
                needed[value, "up"] += 1
        elif any(r in low for r in group.readers):
            needed[value, "down"] += 1
    return needed


def _casts(
    facts: Facts,
    verdicts: Mapping[str, Verdict],
    prices: Prices,
    returned_inside: frozenset[str],
) -> tuple[list[CastGroup], list[tuple[str, str, str]]]:
    """One group of readers per value, region and epoch: those may share a cast."""
    readers: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    follows: list[tuple[str, str, str]] = []
    for name, verdict in verdicts.items():
        fact = facts.nodes[name]
        for operand, mode in zip(fact.operands, verdict.modes, strict=True):
            at = facts.producer(operand.value)
            # A comparison, or a cast of the user's, shows the bits of a move.
            shows = at in verdicts and verdicts[at].moves and mode != "same"
            if mode == "any" and not shows:
                continue
            key = (operand.value, fact.region, operand.epoch)
            readers[key].append(FP32 if shows or mode == "high" else name)
            if mode == "follow":
                follows.append((name, at, "reads the value at its own precision"))
    for value in sorted(facts.returned):
        if facts.nodes[value].is_value:
            readers[(value, -1, -1)].append(FP32)
    groups = []
    for (value, region, epoch), names in readers.items():
        maker = facts.producer(value)
        up: int | None = prices.up[value]
        if value in returned_inside and region >= 0:
            up = 0  # the up-cast that is returned serves them
        elif maker in verdicts and verdicts[maker].moves:
            up = None  # what it moves would be rounded for nobody
        groups.append(
            CastGroup(
                name=f"{value} in region {region}.{epoch}",
                value=maker,
                readers=tuple(dict.fromkeys(names)),
                down=prices.down[value],
                up=up,
            )
        )
    return groups, follows


def _returned_and_used(facts: Facts, verdicts: Mapping[str, Verdict]) -> frozenset[str]:
    """Values returned and read inside too, where a gradient flows (Grad-CAM).

    Were the returned tensor an up-cast beside the inner uses, the gradient of the loss
    with respect to it would not exist.  So readers inside hang on the returned tensor;
    low ones read the low value it was cast from, through a node whose gradient goes to
    the returned tensor.
    """
    read = {o.value for n in verdicts for o in facts.nodes[n].operands}
    return frozenset(
        v
        for v in facts.returned & read
        if facts.nodes[v].requires_grad
        and v not in facts.constants
        and facts.nodes[v].storage not in facts.mutated
    )


def _returned_aliases(facts: Facts) -> set[str]:
    """Nodes that must be fp32 for returned tensors to share memory as they did.

    With inputs, attributes and each other: a view of a cast is a view of nothing else.
    """
    sharing: dict[int, list[str]] = defaultdict(list)
    for value in sorted(facts.returned):
        if facts.nodes[value].is_value:
            sharing[facts.nodes[value].storage].append(value)
    found: set[str] = set()
    for storage, values in sharing.items():
        if storage not in facts.outside and len(values) == 1:
            continue
        chains = [_views_down_to(value, facts) for value in values]
        found.update(facts.producer(value) for value in values)
        found.update(view for views, _ in chains for view in views)
        # A cast of what they all view serves them all, within one region.
        if len({facts.nodes[views[-1]].region for views, _ in chains if views}) > 1:
            found.update(base for _, base in chains)
    return found


def _views_down_to(value: str, facts: Facts) -> tuple[list[str], str]:
    """The makers of `value` and of what it is a view of; the last of them apart."""
    storage = facts.nodes[value].storage
    views: list[str] = []
    while True:
        maker = facts.producer(value)
        below = (o.value for o in facts.nodes[maker].operands)
        value = next((v for v in below if facts.nodes[v].storage == storage), "")
        if not value:
            return views, maker
        views.append(maker)


def _ties(facts: Facts, unary: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Everything that shares a storage that is written to has one dtype."""
    last: dict[int, str] = {}
    ties: list[tuple[str, str, str]] = []
    for fact in facts.nodes.values():
        maker = facts.producer(fact.name)
        if not fact.is_value or fact.storage not in facts.mutated or maker not in unary:
            continue
        if fact.storage in last and last[fact.storage] != maker:
            why = "shares storage that is written in place"
            ties.append((last[fact.storage], maker, why))
        last[fact.storage] = maker
    return ties


def _legal_energy(problem: Problem, low: frozenset[str]) -> int:
    cost = energy(problem, low)
    if cost is None:
        raise PlacementError(
            "a placement broke its own constraints; this is a bug in autoamp, please "
            f"report it with the graph (low nodes: {', '.join(sorted(low)[:8])} ...)",
            nodes=sorted(low - project(problem, low)),
        )
    return cost


def _decisions(
    facts: Facts,
    verdicts: Mapping[str, Verdict],
    low: frozenset[str],
    problem: Problem,
    rewarded: bool,
) -> dict[str, Decision]:
    decisions = {}
    for name, verdict in verdicts.items():
        fact = facts.nodes[name]
        decisions[name] = Decision(
            name=name,
            op=fact.op,
            category=verdict.category,
            low=name in low,
            reason=_reason(verdict, problem.pinned_high.get(name)),
            choice=_choice(verdict, name in low, name in problem.pinned_high, rewarded),
            origin=verdict.origin,
            module=fact.module,
            source=fact.source,
            listed=verdict.listed,
        )
    return decisions


def _reason(verdict: Verdict, pin: str | None) -> str:
    if pin is not None and not verdict.pinned:
        return pin
    return verdict.reason


def _choice(verdict: Verdict, low: bool, pinned: bool, rewarded: bool) -> str:
    """What decided a free node."""
    if pinned:
        return ""
    if verdict.category is not Category.ALLOW:
        if low:
            return "its neighbours are low"
        return "going low would cost more casts than it saves"
    if low:
        if rewarded:
            return "do_no_harm=False converts it wherever it may be"
        return "predicted to gain more than it casts"
    return "predicted to gain nothing here"
