"""The placements of other tools, to compare with and to choose from.

Each policy labels nodes by its own rule; `project` then makes the labels legal by
raising to fp32 the nodes that our constraints forbid to be low, so that all policies
are priced alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

import networkx as nx

from autoamp.passes.decide.ceiling import low_under_autocast
from autoamp.passes.decide.mincut import Problem
from autoamp.passes.decide.verdict import Classified
from autoamp.passes.rules import Category, family


def forced(classified: Classified) -> frozenset[str]:
    """Allow ops low, everything else fp32."""
    allowed = filter(classified.is_allowed, classified.verdicts)
    return frozenset(allowed) - classified.pinned


def promote(classified: Classified) -> frozenset[str]:
    """Autocast's rule: allow low, deny fp32, other ops as wide as their operands."""
    return low_under_autocast(classified)


def tensorflow(classified: Classified) -> frozenset[str]:
    """The painting passes of TensorFlow's grappler pass, in its order.

    1 allow ops; 2 deny spreads forward over deny, infer and the clear ops that lead to
    them; 3 clear and infer ops between two allow ops; 4 infer ops directly after an
    allow op (in every mode since TensorFlow 2.21); 5 clear ops next to anything low;
    6 casts to fp32 that only low ops read.

    An op in no list and a cast stop every pass.  A pinned op counts as one that
    TensorFlow may not process: it is never painted, though if it is denied it denies
    the ops after it.
    """
    facts, verdicts = classified.facts, classified.verdicts
    kind = {
        n: v.category
        for n, v in verdicts.items()
        if v.listed and facts.nodes[n].op and facts.nodes[n].base not in family("cast")
    }
    free = {n for n in kind if not verdicts[n].pinned}
    clear = {n for n, k in kind.items() if k is Category.CLEAR}
    edges = _edges(classified)
    after, before = edges.succ, edges.pred
    # The nodes on one written storage can only have one precision.  TensorFlow's lists
    # of tensors are such sets; nothing else in its graphs is.
    written: dict[int, set[str]] = defaultdict(set)
    for name, fact in facts.nodes.items():
        if fact.is_value and fact.storage in facts.mutated:
            written[fact.storage].add(facts.producer(name))
    clusters = [cluster & kind.keys() for cluster in written.values()]

    # Step 2: downstream of a deny op, up to the last deny or infer op.
    denied = {n for n, k in kind.items() if k is Category.DENY}
    deny_like = denied | {n for n, k in kind.items() if k is Category.INFER}
    leads = _reach(deny_like, before, clear)
    denied |= _reach(denied, after, deny_like | leads)
    denied |= {n for c in clusters if denied & c for n in c}
    allow = {n for n in free - denied if kind[n] is Category.ALLOW}
    between = {n for n in free - denied - allow if kind[n] is not Category.DENY}
    low = allow | _reach(allow, before, _reach(allow, after, between))
    for name, category in kind.items():
        if category is Category.INFER and name in between:
            makers = before[name]
            if any(m in low for m in makers) and not any(m in denied for m in makers):
                low.add(name)
    # Step 5 goes both ways: a clear op takes the dtype of any neighbour.
    low |= _reach(low, edges.to_undirected(as_view=True).adj, between & clear)
    # One storage has one dtype: without this line `project` would raise them all.
    low |= {n for c in clusters if low & c and c <= free - denied for n in c}
    return frozenset(low | _casts_read_low(classified, low))


def _casts_read_low(classified: Classified, low: Collection[str]) -> set[str]:
    """Casts of booleans or whole numbers to fp32, all of whose readers are low."""
    facts, verdicts = classified.facts, classified.verdicts
    readers: dict[str, list[bool]] = defaultdict(list)
    for name in verdicts:
        for operand in facts.nodes[name].operands:
            readers[operand.value].append(name in low)
    return {
        name
        for name, verdict in verdicts.items()
        if facts.nodes[name].base in family("cast")
        and not (verdict.pinned or facts.nodes[name].operands)
        and name not in facts.returned
        and readers[name]
        and all(readers[name])
    }


POLICIES: dict[str, Callable[[Classified], frozenset[str]]] = {
    "tensorflow": tensorflow,
    "promote": promote,
    "forced": forced,
}


def project(problem: Problem, low: Iterable[str]) -> frozenset[str]:
    """The labels nearest to `low` from below that break no constraint of `problem`."""
    legal = {n for n in low if n in problem.unary} - problem.at_sink.keys()
    while True:
        split = [(a, b) for a, b, _ in problem.ties if (a in legal) != (b in legal)]
        wrong = {name for pair in split for name in pair}
        wrong |= {r for r, v, _ in problem.follows if r in legal and v not in legal}
        for group in problem.groups:
            if group.to_sink is None and any(r not in legal for r in group.readers):
                wrong.add(group.value)
            if group.to_source is None and group.value not in legal:
                wrong.update(group.readers)
        wrong &= legal
        # A node that is raised may break a constraint of another one.
        if not wrong:
            return frozenset(legal)
        legal -= wrong


def _edges(classified: Classified) -> nx.DiGraph:
    """The ops, with edges from makers to their readers.

    A reader that always needs fp32 has no edge.  Each node on a written storage counts
    as a maker for the later nodes on the storage.
    """
    facts, verdicts = classified.facts, classified.verdicts
    graph = nx.DiGraph()
    graph.add_nodes_from(verdicts)
    writers: dict[int, set[str]] = defaultdict(set)
    for name in verdicts:
        fact = facts.nodes[name]
        makers = {
            facts.producer(operand.value)
            for operand, mode in classified.reads(name)
            if mode != "high"
        }
        if fact.storage in facts.mutated:
            makers |= writers[fact.storage]
            writers[fact.storage].add(name)
        graph.add_edges_from((maker, name) for maker in makers & verdicts.keys())
    return graph


def _reach(
    start: Iterable[str], edges: Mapping[str, Iterable[str]], through: set[str]
) -> set[str]:
    """The nodes reached from `start` along `edges`, entering only `through` nodes."""
    found: set[str] = set()
    frontier = list(start)
    while frontier:
        for name in edges.get(frontier.pop(), ()):
            if name in through and name not in found:
                found.add(name)
                frontier.append(name)
    return found
