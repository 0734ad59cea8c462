"""Islands: connected ops that run in fp32, with the ops that must be fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx as nx

from autoamp.inspect.rows import OpRow, Section


@dataclass(frozen=True)
class Island:
    """Connected fp32 ops of one graph or body.

    Attributes:
        graph, body: the section of the ops.
        ops: the names of the ops, in graph order.
        decided_by: the names of the ops that must be fp32; the other ops of the island
            are fp32 because casts would cost more.  Empty where the whole island is
            fp32 because of prices alone.
        reasons: the reasons of the ops `decided_by`, each once, the most frequent
            first; where `decided_by` is empty, the reasons of all ops.
        modules: the paths of the modules that call the ops, each once.
        bytes: fp32 bytes that the ops read and write.
        casts: casts between the island and low ops.
        is_between: whether the island reads the results of low ops and low ops read
            the results of the island.
    """

    graph: int
    body: str
    ops: tuple[str, ...]
    decided_by: tuple[str, ...]
    reasons: tuple[str, ...]
    modules: tuple[str, ...]
    bytes: int
    casts: int
    is_between: bool


def islands_of(sections: Sequence[Section]) -> list[Island]:
    """The islands of all sections; the island that moves most bytes comes first."""
    found = [island for section in sections for island in _in_section(section)]
    return sorted(found, key=lambda island: -island.bytes)


def _in_section(section: Section) -> Iterator[Island]:
    rows = {row.name: row for row in section.ops}
    flow = _flow(section, rows)
    high = [name for name, row in rows.items() if not row.is_low]
    order = {name: place for place, name in enumerate(rows)}
    components = nx.weakly_connected_components(flow.subgraph(high))
    # A component is a set, whose order differs from process to process.
    ordered = [sorted(names, key=order.__getitem__) for names in components]
    for names in sorted(ordered, key=lambda names: order[names[0]]):
        yield _island(section, flow, rows, names)


def _flow(section: Section, rows: dict[str, OpRow]) -> nx.DiGraph:
    """The float ops, with an edge from each op to the ops that read its result."""
    facts = section.rewritten.facts
    flow = nx.DiGraph()
    flow.add_nodes_from(rows)
    for name in rows:
        for operand in facts.nodes[name].operands:
            maker = facts.maker(operand.value)
            if maker in rows:
                flow.add_edge(maker, name)
    return flow


def _island(
    section: Section, flow: nx.DiGraph, rows: dict[str, OpRow], names: list[str]
) -> Island:
    inside = set(names)
    before = {a for n in names for a in flow.predecessors(n)} - inside
    after = {b for n in names for b in flow.successors(n)} - inside
    given_up = {n for n in inside if any(b not in inside for b in flow.successors(n))}
    pinned = section.rewritten.assignment.pinned
    decided = [name for name in names if name in pinned]
    heard: dict[str, int] = {}
    for name in decided or names:
        heard[rows[name].heading] = heard.get(rows[name].heading, 0) + 1
    modules = dict.fromkeys(rows[n].module for n in names if rows[n].module)
    return Island(
        graph=section.graph,
        body=section.body,
        ops=tuple(names),
        decided_by=tuple(decided),
        reasons=tuple(sorted(heard, key=lambda reason: -heard[reason])),
        modules=tuple(modules),
        bytes=sum(rows[n].bytes for n in names),
        casts=len(before) + len(given_up),
        is_between=bool(before and after),
    )
