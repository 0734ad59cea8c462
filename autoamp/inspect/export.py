"""The report for programs: JSON, a networkx graph, Graphviz."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

import networkx as nx
import torch
from torch import fx

from autoamp.dtypes import short_name
from autoamp.inspect.costs import costs_of
from autoamp.inspect.rows import CastRow, OpRow, Section, cast_rows, op_rows
from autoamp.inspect.text import portable, portable_place
from autoamp.rewrite.emitted import USES
from autoamp.saved.document import SCHEMA, VERSION, SavedGraph, SavedOp

_COLOURS = {"fp32": "#f4c7a1", "bf16": "#a9cdf0", "fp16": "#a9cdf0"}
_CAST_COLOUR = "#e3e3e3"


def to_json(
    head: dict[str, Any],
    sections: Sequence[Section],
    skipped: Sequence[tuple[str, str]],
) -> str:
    """The report as JSON, the same to the byte in every process and on every machine.

    Times of the pass are left out, because they differ from run to run.  Every key is
    described in docs/report-schema.md.
    """
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        **head,
        "graphs": [_section(s) for s in sections],
        "ops": [_op(row) for s in sections for row in op_rows(s)],
        "casts": [_cast(row) for s in sections for row in cast_rows(s)],
        "skipped": [
            {"what": portable_place(what), "why": portable(why)}
            for what, why in skipped
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def saved_graph(section: Section) -> SavedGraph:
    """A graph that is not saved yet, as it would be read back from the JSON.

    The device and the casts are left out.
    """
    names = [field.name for field in fields(SavedOp)]
    ops = (_op(row) for row in op_rows(section))
    return SavedGraph(
        graph=section.graph,
        body=section.body,
        device="",
        ops=tuple(SavedOp(**{name: op[name] for name in names}) for op in ops),
    )


def to_networkx(sections: Sequence[Section]) -> nx.DiGraph:
    """The rewritten graphs as one directed graph from producers to readers.

    A node is called "<graph>/<name>".  Attributes: `graph`, `name`, `kind` ("input",
    "op", "weight cast", "down cast", "up cast", "use", "output"), `op`, `precision` (of
    the result; "" if the result is no float), `category`, `reason`, `module` and
    `source` ("" where there is none).
    """
    whole = nx.DiGraph()
    for section in sections:
        ops = {row.name: row for row in op_rows(section)}
        casts = {row.name: row for row in cast_rows(section)}
        for node in section.rewritten.gm.graph.nodes:
            key = f"{section.key}/{node.name}"
            whole.add_node(key, **_attributes(section, node, ops, casts))
            for source in node.all_input_nodes:
                whole.add_edge(f"{section.key}/{source.name}", key)
    return whole


def to_dot(sections: Sequence[Section]) -> str:
    """The rewritten graphs in Graphviz's language, one cluster each."""
    whole = to_networkx(sections)
    lines = ["digraph autoamp {", "  node [shape=box, style=filled];"]
    for number, section in enumerate(sections):
        lines.append(f"  subgraph cluster_{number} {{")
        lines.append(f"    label={_quoted(f'graph {section.key}')};")
        lines.extend(_dot_nodes(whole, section.key))
        lines.append("  }")
    lines.extend(f"  {_quoted(a)} -> {_quoted(b)};" for a, b in whole.edges)
    return "\n".join([*lines, "}"]) + "\n"


def _section(section: Section) -> dict[str, Any]:
    costs = costs_of(section.rewritten)
    return {
        "graph": section.graph,
        "body": section.body,
        "nodes": len(section.rewritten.before.graph.nodes),
        "compute_dtype": section.low,
        "device": costs.device,
        "unit": "bytes" if costs.in_bytes else "0.1 ns",
        "optimal_cost": costs.optimal_cost,
        "recounted_cost": costs.recounted,
        "reward_per_allow_op": costs.reward,
        "placements": {name: asdict(p) for name, p in costs.placements.items()},
    }


def _op(row: OpRow) -> dict[str, Any]:
    found = {key: value for key, value in asdict(row).items() if key != "heading"}
    return {
        **found,
        "reason": portable(row.reason),
        "origin": os.path.basename(row.origin),
        "source": portable_place(row.source),
    }


def _cast(row: CastRow) -> dict[str, Any]:
    return {**asdict(row), "source": portable_place(row.source)}


def _attributes(
    section: Section,
    node: fx.Node,
    ops: dict[str, OpRow],
    casts: dict[str, CastRow],
) -> dict[str, str]:
    row, cast = ops.get(node.name), casts.get(node.name)
    if cast is not None:
        kind, reason = f"{cast.kind} cast", f"{cast.value} is read in {cast.dtype}"
    elif node.target in USES:
        kind, reason = "use", "uses of a cast, so that gradients are summed in fp32"
    else:
        kind = {"output": "output", "placeholder": "input", "get_attr": "input"}.get(
            node.op, "op"
        )
        reason = row.reason if row is not None else ""
    target = node.target
    return {
        "graph": section.key,
        "name": node.name,
        "kind": kind,
        "op": row.op if row is not None else str(getattr(target, "__name__", target)),
        "precision": _precision(node),
        "category": row.category if row is not None else "",
        "reason": reason,
        "module": row.module if row is not None else "",
        "source": row.source if row is not None else "",
    }


def _precision(node: fx.Node) -> str:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        return short_name(first.dtype)
    return ""


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
