"""From a classified graph and its prices to its placement problem, and the answer.

The solver knows two sides.  Here the source side is low, and the sink side is fp32.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autoamp.errors import PlacementError
from autoamp.passes.decide.branches import WHY, on_branches
from autoamp.passes.decide.cost import Prices
from autoamp.passes.decide.mincut import (
    ContradictionError,
    Group,
    Problem,
    solve,
)
from autoamp.passes.decide.pins import views_down_to
from autoamp.passes.decide.verdict import Classified
from autoamp.passes.rules import family
from autoamp.passes.see.facts import FP32, Facts


def build_problem(
    classified: Classified, prices: Prices, *, as_asked: bool = False
) -> Problem:
    """The placement problem of a graph: unary prices, pins, casts, ties.

    Args:
        as_asked: whether the placement is one that the user names.
    """
    facts = classified.facts
    unary = dict(prices.ops)
    pinned = {n: v.reason for n, v in classified.verdicts.items() if v.pinned}
    for name in facts.constants:
        unary[name] = (0, 0)
        pinned[name] = "comes from outside the graph in fp32"
    # One node stands for every reader that is fp32 whatever is decided.
    unary[FP32] = (0, 0)
    pinned[FP32] = "is read in fp32 outside the graph"
    why = "is returned, or viewed by what is, and shares memory with another tensor"
    pinned |= dict.fromkeys(_returned_aliases(facts), why)
    pinned |= dict.fromkeys(on_branches(classified), WHY)
    pinned |= _seen_whole(classified, returned=not as_asked)
    groups, follows = _cast_groups(classified, prices)
    follows += _rounded_before_maxima(classified)
    return Problem(
        unary=unary,
        at_sink={n: why for n, why in pinned.items() if n in unary},
        groups=groups,
        ties=_ties(facts, unary),
        follows=follows,
    )


def held(problem: Problem, names: Iterable[str], *, low: bool, why: str) -> Problem:
    """The same problem with some nodes held in a precision."""
    more = dict.fromkeys(names, why)
    if low:
        return replace(problem, at_source={**problem.at_source, **more})
    return replace(problem, at_sink={**problem.at_sink, **more})


def least_cost(problem: Problem) -> tuple[frozenset[str], int]:
    """The nodes that are low in the placement of least cost, and that cost.

    Raises:
        PlacementError: the constraints contradict each other; the message is the chain
            of nodes from one that must be low to one that must be fp32.
    """
    try:
        solution = solve(problem)
    except ContradictionError as error:
        if not error.chain:
            why = "no legal placement exists"
        else:
            (start, because), *steps, (end, why_not) = error.chain
            must = [f"{start} must be low ({because})"]
            must += [f"then {node} as well ({reason})" for node, reason in steps]
            must.append(f"but {end} must stay fp32 ({why_not}). Drop one of the two.")
            why = "; ".join(must)
        raise PlacementError(f"contradictory constraints: {why}") from None
    return solution.source, solution.cost


def promised_casts(problem: Problem, low: frozenset[str]) -> Counter[tuple[str, str]]:
    """The casts of each value that labelling `low` needs, by (value, "down" or "up").

    The counts are in graph order; the recount over the emitted graph must agree.
    """
    needed: Counter[tuple[str, str]] = Counter()
    for group in problem.groups:
        if group.value in low:
            if any(r not in low for r in group.readers):
                needed[group.key[0], "up"] += 1
        elif any(r in low for r in group.readers):
            needed[group.key[0], "down"] += 1
    return needed


def _cast_groups(
    classified: Classified, prices: Prices
) -> tuple[list[Group], list[tuple[str, str, str]]]:
    """One group per value, region and epoch, whose readers may share a cast."""
    facts = classified.facts
    readers: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    as_they_come: set[str] = set()
    follows: list[tuple[str, str, str]] = []
    for name in classified.verdicts:
        for operand, mode in classified.reads(name):
            at = facts.producer(operand.value)
            # A comparison, or a cast of the user's, would show a move's rounding.
            shows = classified.moves(at) and mode != "same"
            if mode == "any" and not shows:
                as_they_come.add(operand.value)
                continue
            # A cast made under `no_grad` or autocast is no cast for readers outside,
            # and a cast from before a write is stale.
            key = (operand.value, facts.nodes[name].region, operand.epoch)
            readers[key].append(FP32 if shows or mode == "high" else name)
            if mode == "follow":
                follows.append((name, at, "one reads the other's value as it comes"))
    for value in sorted(facts.returned):
        if facts.nodes[value].is_value:
            # The results are cast at the end, behind all regions and writes.
            readers[(value, -1, -1)].append(FP32)
    returned_inside = returned_and_used(classified)
    for value in sorted(returned_inside & prices.wide.keys()):
        inside = [key for key in readers if key[0] == value and key[1] >= 0]
        if len(inside) == 1:  # the cast that is returned serves both groups
            readers[inside[0]] += readers.pop((value, -1, -1))
    copies = Counter(value for value, _, _ in readers)
    groups = []
    for key, names in readers.items():
        value, region, _ = key
        maker = facts.producer(value)
        up: int | None = prices.up[value]
        if value in returned_inside and region >= 0 and copies[value] > 1:
            up = 0  # the up-cast that is returned serves these readers
        elif classified.moves(maker):
            up = None  # a move may round only for low readers
        made = None
        # A product writes one dtype, so that one group has to hold all the readers.
        if up is not None and copies[value] == 1 and value not in as_they_come:
            made = prices.wide.get(value)
            if made is not None:
                # The problem is a minimum cut only for prices within these bounds, and
                # prices that were measured one by one may lie outside.
                made = min(max(made, up - prices.down[value]), up)
        groups.append(
            Group(
                key=key,
                value=maker,
                readers=tuple(dict.fromkeys(names)),
                to_source=prices.down[value],
                to_sink=up,
                why=f"{maker} would round numbers that are read in fp32",
                made=made,
            )
        )
    return groups, follows


def _rounded_before_maxima(classified: Classified) -> list[tuple[str, str, str]]:
    """Constraints that hold `x - x.amax(-1, True)` and the makers of `x` together.

    Each maker, back to an allow op, is low only if its reader is low.  The gradient of
    the maximum is minus the sum of its row's gradients, so that the gradients of a bias
    before `x` add up to 0.  A cast up between the bias and the maximum would round each
    gradient by itself, and their sum would no longer be 0.
    """
    facts, verdicts = classified.facts, classified.verdicts

    def is_less_its_maximum(name: str) -> bool:
        fact = facts.nodes[name]
        if fact.base not in ("aten::sub", "aten::sub_") or len(fact.operands) != 2:
            return False
        data, most = (o.value for o in fact.operands)
        if not facts.nodes[most].requires_grad:
            return False
        maker = facts.nodes[views_down_to(most, facts)[1]]
        is_maximum = maker.base in ("aten::amax", "aten::max")
        return is_maximum and maker.operands[0].value == data

    free = [name for name, verdict in verdicts.items() if not verdict.pinned]
    pairs: dict[tuple[str, str], None] = {}
    reached = {name for name in free if is_less_its_maximum(name)}
    for name in reversed(free if reached else ()):
        if name in reached and not classified.is_allowed(name):
            makers = {facts.producer(o.value) for o in facts.nodes[name].operands}
            pairs |= dict.fromkeys((maker, name) for maker in sorted(makers))
            reached |= makers
    why = "a maximum is subtracted, and the gradients of both must be rounded alike"
    return [(maker, name, why) for maker, name in pairs]


def returned_and_used(classified: Classified) -> frozenset[str]:
    """Values returned and also read inside, where a gradient flows (Grad-CAM).

    If the returned tensor were an up-cast beside the inner uses, the loss would have no
    gradient with respect to the returned tensor.  So readers inside hang on the
    returned tensor.  Low readers read the low value that the returned tensor was cast
    from, through a node whose gradient goes to the returned tensor.  A value with a
    hook is treated alike: the hook is given the gradients of all its readers.
    """
    facts = classified.facts
    read = {o.value for n in classified.verdicts for o in facts.nodes[n].operands}
    return frozenset(
        v
        for v in (facts.returned & read) | facts.hooked
        if facts.nodes[v].requires_grad
        and v not in facts.constants
        and facts.nodes[v].storage not in facts.mutated
    )


def _seen_whole(classified: Classified, *, returned: bool) -> dict[str, str]:
    """The ops that are fp32 for a hook's sake, each with the reason.

    Such an op saves its result, and a second derivative flows into what is saved.  A
    hook on a cast of the result would miss that part of the gradient, so that the
    result itself is what is hooked, or returned to code that may hook it.

    Args:
        returned: whether results that are returned count; never where the user lists
            the op as one to run low.
    """
    facts, saving = classified.facts, family("saves_its_result")
    reasons: dict[str, str] = {}
    # The results of a body go to the call of the body, and to no code of the user's.
    returns = returned and not facts.is_body
    values = facts.hooked | (facts.returned if returns else frozenset())
    for value in sorted(values):
        fact, maker = facts.nodes[value], facts.producer(value)
        if not (fact.requires_grad and fact.is_value and maker in classified.verdicts):
            continue
        asked = classified.is_allowed(maker) and value not in facts.hooked
        if facts.nodes[maker].base in saving and not asked:
            how = "hooked" if value in facts.hooked else "returned"
            reasons[maker] = f"its backward reads its result, which is {how}"
    return reasons


def _returned_aliases(facts: Facts) -> set[str]:
    """Nodes that must be fp32 for returned tensors to share memory as in the model.

    Returned tensors may share memory with inputs, attributes and each other; a view of
    a cast shares memory with nothing but the cast.
    """
    sharing: dict[int, list[str]] = defaultdict(list)
    for value in sorted(facts.returned):
        if facts.nodes[value].is_value:
            sharing[facts.nodes[value].storage].append(value)
    wide: set[str] = set()
    for storage, values in sharing.items():
        if storage not in facts.outside and len(values) == 1:
            continue
        chains = [views_down_to(value, facts) for value in values]
        wide.update(facts.producer(value) for value in values)
        wide.update(view for views, _ in chains for view in views)
        # Within one region, one cast of the base serves all the views.
        if len({facts.nodes[views[-1]].region for views, _ in chains if views}) > 1:
            wide.update(base for _, base in chains)
    return wide


def _ties(facts: Facts, unary: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Ties between the nodes on one written storage, which has one dtype."""
    last: dict[int, str] = {}
    ties: list[tuple[str, str, str]] = []
    for fact in facts.nodes.values():
        maker = facts.producer(fact.name)
        if not fact.is_value or fact.storage not in facts.mutated or maker not in unary:
            continue
        # Neighbours suffice, as ties are transitive.
        if fact.storage in last and last[fact.storage] != maker:
            why = "they share memory that is written in place"
            ties.append((last[fact.storage], maker, why))
        last[fact.storage] = maker
    return ties
