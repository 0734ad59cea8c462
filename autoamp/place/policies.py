"""Other people's placements, to compare with and to choose from.

Each policy labels nodes by its own rule; `project` then makes the labels legal by
raising to fp32 what our constraints forbid, so that all are priced alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from autoamp.analyse.facts import Facts
from autoamp.analyse.streams import promotes_to_low
from autoamp.analyse.verdict import Verdict
from autoamp.place.mincut import Problem
from autoamp.rules import Category


def forced(_: Facts, verdicts: Mapping[str, Verdict]) -> frozenset[str]:
    """Allow ops low, everything else fp32."""
    return frozenset(
        n for n, v in verdicts.items() if v.category is Category.ALLOW and not v.pinned
    )


def promote(facts: Facts, verdicts: Mapping[str, Verdict]) -> frozenset[str]:
    """Autocast's rule: allow low, deny fp32, the rest as wide as what they read."""
    return frozenset(promotes_to_low(facts, verdicts))


def tensorflow(facts: Facts, verdicts: Mapping[str, Verdict]) -> frozenset[str]:
    """The painting passes of TensorFlow's grappler pass, in its order.

    1 allow ops; 2 deny spreads forward over deny, infer and the clear ops that lead to
    them; 3 clear and infer ops between two allow ops; 4 infer ops directly after an
    allow op (in every mode since TensorFlow 2.21); 5 clear ops next to anything low.
    """
    after, before = _edges(facts, verdicts)
    kind = {n: v.category for n, v in verdicts.items()}
    deny_like = {n for n, k in kind.items() if k in (Category.DENY, Category.INFER)}
    clear = {n for n, k in kind.items() if k is Category.CLEAR}
    leads = _reach(deny_like, before, clear)
    denied = {n for n, k in kind.items() if k is Category.DENY}
    denied |= _reach(denied, after, deny_like | leads)
    allow = {n for n, k in kind.items() if k is Category.ALLOW} - denied
    open_nodes = {n for n in kind if n not in denied and n not in allow}
    open_nodes = {n for n in open_nodes if kind[n] is not Category.DENY}
    downstream = _reach(allow, after, open_nodes)
    low = allow | _reach(allow, before, downstream)
    for name, category in kind.items():
        if category is Category.INFER and name not in denied:
            makers = before[name]
            if any(m in low for m in makers) and not any(m in denied for m in makers):
                low.add(name)
    near = clear - denied
    low |= _reach(low, _either_way(after, before), near)
    return frozenset(low)


POLICIES: dict[str, Callable[[Facts, Mapping[str, Verdict]], frozenset[str]]] = {
    "tensorflow": tensorflow,
    "promote": promote,
    "forced": forced,
}


def project(problem: Problem, low: Iterable[str]) -> frozenset[str]:
    """The labels nearest to `low` from below that break no constraint of `problem`."""
    legal = {n for n in low if n in problem.unary} - problem.pinned_high.keys()
    while True:
        wrong = {x for a, b, _ in problem.ties for x in (a, b) if _split(a, b, legal)}
        wrong |= {r for r, v, _ in problem.follows if r in legal and v not in legal}
        for group in problem.groups:
            if group.up is None and any(r not in legal for r in group.readers):
                wrong.add(group.value)
            if group.down is None and group.value not in legal:
                wrong.update(group.readers)
        wrong &= legal
        if not wrong:
            return frozenset(legal)
        legal -= wrong


def _split(a: str, b: str, legal: set[str]) -> bool:
    return (a in legal) != (b in legal)


def _edges(
    facts: Facts, verdicts: Mapping[str, Verdict]
) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    after: dict[str, set[str]] = defaultdict(set)
    before: dict[str, set[str]] = defaultdict(set)
    for name in verdicts:
        for operand in facts.nodes[name].operands:
            maker = facts.producer(operand.value)
            if maker in verdicts:
                after[maker].add(name)
                before[name].add(maker)
    return after, before


def _either_way(
    a: Mapping[str, set[str]], b: Mapping[str, set[str]]
) -> dict[str, set[str]]:
    """Neighbours in either direction."""
    return {n: a.get(n, set()) | b.get(n, set()) for n in {*a, *b}}


def _reach(
    start: Iterable[str], edges: Mapping[str, set[str]], through: set[str]
) -> set[str]:
    """What is reached from `start` along `edges`, entering only nodes of `through`."""
    found: set[str] = set()
    frontier = list(start)
    while frontier:
        for name in edges.get(frontier.pop(), ()):
            if name in through and name not in found:
                found.add(name)
                frontier.append(name)
    return found
