"""The report for programs: JSON, a networkx graph, Graphviz."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import Any

import networkx as nx

from autoamp.dtypes import LOW_DTYPES
from autoamp.inspect.devices import made_with
from autoamp.inspect.document import Document
from autoamp.inspect.guarded import attempt
from autoamp.inspect.nodes.node import Node, Side
from autoamp.inspect.rows import CastRow, OpRow, Section
from autoamp.inspect.text import portable, portable_place
from autoamp.place.devices import NEUTRAL
from autoamp.place.figures import figures_of
from autoamp.saved.document import SCHEMA, VERSION, SavedGraph, SavedOp

_COLOURS = {"fp32": "#f4c7a1", **dict.fromkeys(LOW_DTYPES, "#a9cdf0")}
_CAST_COLOUR = "#e3e3e3"


def to_json(document: Document) -> str:
    """The report as JSON, the same to the byte in every process and on every machine.

    Another version of torch or of autoamp is named in it.  Times of the pass are left
    out, because they differ from run to run.  Every key is described in
    docs/report-schema.md.
    """
    scale, coverage = document.loss_scale, document.coverage
    failed: dict[str, str] = {}

    def part(key: str, make: Callable[[], Any], none: Any = None) -> Any:
        def instead(said: str) -> Any:
            failed[key] = said
            return none

        return attempt(f'"{key}"', make, instead)

    saved = {
        "schema": SCHEMA,
        "version": VERSION,
        "versions": dict(made_with()),
        "model": document.label,
        "compute_dtype": document.compute_dtype,
        "runs": document.runs,
        "unwatched": document.unwatched,
        "loss_scale": asdict(scale) if scale else None,
        "coverage": coverage.counts_and_shares() if coverage else None,
        "cost": part("cost", lambda: document.cost),
        "optimal_cost": part("optimal_cost", lambda: document.optimal_cost),
        "regret": part("regret", lambda: document.regret),
        "headline": part("headline", lambda: _headline(document)),
        "budget": part("budget", lambda: _budget(document)),
        "devices": part("devices", lambda: _devices(document), []),
        "graphs": part("graphs", lambda: [*map(_section, document.sections)], []),
        "ops": part("ops", lambda: [*map(_op, document.ops)], []),
        "casts": part("casts", lambda: [*map(_cast, document.casts)], []),
        "skipped": [
            {"what": portable_place(what), "why": portable(why)}
            for what, why in document.skipped
        ],
    }
    saved["failed"] = failed
    return json.dumps(saved, indent=1, ensure_ascii=False) + "\n"


def _headline(document: Document) -> dict[str, Any] | None:
    return document.headline.figures() if document.rewritten else None


def _budget(document: Document) -> dict[str, Any] | None:
    return document.frontier.as_json() if document.frontier else None


def saved_graph(section: Section) -> SavedGraph:
    """A section of a report as `SavedGraph`, without the device and the casts."""
    names = [field.name for field in fields(SavedOp)]
    ops = (_op(row) for row in section.ops)
    return SavedGraph(
        graph=section.graph,
        body=section.body,
        device="",
        ops=tuple(SavedOp(**{name: op[name] for name in names}) for op in ops),
    )


def to_networkx(document: Document) -> nx.DiGraph:
    """The rewritten graphs as one directed graph from producers to readers.

    A node is called "<graph>/<name>".  Attributes: `graph`, `name`, `kind` ("input",
    "op", "weight cast", "down cast", "up cast", "use", "output"), `op`, `precision` (of
    the result; "" if the result is no float), `category`, `reason`, `module` and
    `source` ("" where unknown).
    """
    whole = nx.DiGraph()
    for section, nodes in zip(document.sections, document.nodes, strict=True):
        for node in nodes.entries:
            if node.after is None:
                continue
            key = f"{section.key}/{node.name}"
            whole.add_node(key, graph=section.key, **_attributes(node, node.after))
            for operand in node.after.operands:
                whole.add_edge(f"{section.key}/{operand}", key)
    return whole


def to_dot(document: Document) -> str:
    """The rewritten graphs in Graphviz's language, one cluster each."""
    whole = to_networkx(document)
    lines = ["digraph autoamp {", "  node [shape=box, style=filled];"]
    for number, section in enumerate(document.sections):
        lines.append(f"  subgraph cluster_{number} {{")
        lines.append(f"    label={_quoted(f'graph {section.key}')};")
        lines.extend(_dot_nodes(whole, section.key))
        lines.append("  }")
    lines.extend(f"  {_quoted(a)} -> {_quoted(b)};" for a, b in whole.edges)
    return "\n".join([*lines, "}"]) + "\n"


def _devices(document: Document) -> list[dict[str, Any]]:
    """Each device that ops are priced for, with the figures behind the prices."""
    each = (s.rewritten.assignment.prices.device for s in document.sections)
    return [figures_of(d) for d in dict.fromkeys(each) if d is not NEUTRAL]


def _section(section: Section) -> dict[str, Any]:
    costs = section.costs
    return {
        "graph": section.graph,
        "body": section.body,
        "nodes": len(section.before),
        "compute_dtype": section.low,
        "device": costs.device,
        "exact_casts": section.exact_casts,
        "unit": "bytes" if costs.in_bytes else "0.1 ns",
        "optimal_cost": costs.optimal_cost,
        "recounted_cost": costs.ours.cost,  # the check of the casts has counted it
        "reward_per_allow_op": costs.reward,
        "placements": {name: asdict(p) for name, p in costs.placements.items()},
    }


def _op(row: OpRow) -> dict[str, Any]:
    found = {k: v for k, v in vars(row).items() if k not in ("heading", "rule")}
    return {
        **found,
        "reason": portable(row.reason),
        "origin": os.path.basename(row.origin),
        "source": portable_place(row.source),
    }


def _cast(row: CastRow) -> dict[str, Any]:
    return {**vars(row), "source": portable_place(row.source)}


_INPUTS = frozenset({"weight", "input", "constant", "state", "body"})


def _attributes(node: Node, after: Side) -> dict[str, str]:
    row, cast, kind = node.decision, node.cast, node.kind
    reason = row.reason if row else ""
    if cast:
        kind, reason = f"{cast.kind} cast", f"{cast.value} is read in {cast.dtype}"
    elif kind == "use":
        reason = "joins the uses of a cast, so that gradients are summed in fp32"
    return {
        "name": node.name,
        "kind": "input" if kind in _INPUTS else kind,
        "op": node.op,
        "precision": after.precision,
        "category": row.category if row else "",
        "reason": reason,
        "module": row.module if row else "",
        "source": row.source if row else "",
    }


def _dot_nodes(whole: nx.DiGraph, key: str) -> Iterator[str]:
    for name, data in whole.nodes(data=True):
        if data["graph"] != key:
            continue
        is_cast = data["kind"].endswith("cast")
        colour = _CAST_COLOUR if is_cast else _COLOURS.get(data["precision"], "white")
        words = [data["name"], f"{data['precision']} {data['category']}".strip()]
        label = "\n".join(word for word in words if word)
        shape = "ellipse" if is_cast else "box"
        yield (
            f"    {_quoted(name)} [label={_quoted(label)}, shape={shape}, "
            f'fillcolor="{colour}", tooltip={_quoted(data["reason"])}];'
        )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
