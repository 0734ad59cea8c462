"""The report for programs: JSON, a networkx graph, Graphviz."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any

import networkx as nx
import torch
from torch import fx

from autoamp.dtypes import LOW_DTYPES, short_name
from autoamp.messages import attempt, portable, portable_place
from autoamp.passes.decide.devices import NEUTRAL, figures_of
from autoamp.passes.report_rows import (
    FP32,
    SCHEMA,
    VERSION,
    OpRow,
    Section,
    portable_row,
    target_name,
)
from autoamp.passes.see.nodes import tensors_of
from autoamp.passes.write.emitted import is_use
from autoamp.reports.figures import Document

_COLOURS = {FP32: "#f4c7a1", **dict.fromkeys(LOW_DTYPES, "#a9cdf0")}
_CAST_COLOUR = "#e3e3e3"
_KINDS = {"placeholder": "input", "get_attr": "input", "output": "output"}

_OP_KEYS = (
    "graph",
    "body",
    "name",
    "op",
    "category",
    "precision",
    "reason",
    "origin",
    "module",
    "source",
    "listed",
    "bytes",
    "kernel",
    "calls",
    "cost_fp32",
    "cost_low",
)
"""The attributes of an `OpRow` that a file has."""


def to_json(report: Document) -> str:
    """The report as JSON, the same to the byte in every process and on every machine.

    Another version of torch or of autoamp is named in it.  Times of the pass are left
    out, because they differ from run to run.  Every key is described in
    docs/report.schema.json.
    """
    scale, coverage = report.loss_scale, report.coverage
    failed: dict[str, str] = {}

    def part(key: str, make: Callable[[], Any], none: Any = None) -> Any:
        def instead(said: str) -> Any:
            failed[key] = said
            return none

        return attempt(f'"{key}"', make, instead)

    def headline() -> dict[str, Any] | None:
        return report.headline.figures() if report.rewritten else None

    def devices() -> list[dict[str, Any]]:
        priced = (s.rewritten.assignment.prices.device for s in report.sections)
        return [figures_of(d) for d in dict.fromkeys(priced) if d is not NEUTRAL]

    def casts() -> list[dict[str, Any]]:
        return [{**vars(c), "source": portable_place(c.source)} for c in report.casts]

    saved = {
        "schema": SCHEMA,
        "version": VERSION,
        "versions": _versions(),
        "model": report.label,
        "compute_dtype": report.compute_dtype,
        "runs": report.runs,
        "unwatched": report.unwatched,
        "loss_scale": asdict(scale) if scale else None,
        "updates": [asdict(each) for each in report.updates],
        "coverage": coverage.counts_and_shares() if coverage else None,
        "cost": part("cost", lambda: report.cost),
        "optimal_cost": part("optimal_cost", lambda: report.optimal_cost),
        "regret": part("regret", lambda: report.regret),
        "headline": part("headline", headline),
        "memory": report.memory.figures() if report.memory else None,
        "devices": part("devices", devices, []),
        "graphs": part("graphs", lambda: [*map(_section, report.sections)], []),
        "ops": part("ops", lambda: [*map(_op, report.ops)], []),
        "casts": part("casts", casts, []),
        "skipped": [
            {"what": portable_place(what), "why": portable(why)}
            for what, why in report.skipped
        ],
    }
    saved["failed"] = failed
    text = json.dumps(saved, indent=1, ensure_ascii=False) + "\n"
    # A name may hold a mark that turns writing round, or half a character.
    plain = (c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    return "".join(plain)


def _versions() -> dict[str, str]:
    """The versions that decide a placement, torch's without the name of its build.

    The builds of one version for CPU and for CUDA place alike, so a report that both of
    them wrote is the same to the byte.
    """
    try:
        autoamp = metadata.version("autoamp")
    except metadata.PackageNotFoundError:  # run from a copy that is not installed
        autoamp = "unknown"
    return {"torch": str(torch.__version__).partition("+")[0], "autoamp": autoamp}


def _section(section: Section) -> dict[str, Any]:
    costs = section.costs
    placements = {
        name: {
            key: vars(p)[key] for key in ("cost", "estimate", "kept", "allow_in_fp32")
        }
        for name, p in costs.placements.items()
    }
    return {
        "graph": section.graph,
        "body": section.body,
        "nodes": len(section.before),
        "compute_dtype": section.low,
        "device": costs.device,
        "exact_casts": section.exact_casts,
        "unit": "0.1 ns",
        "optimal_cost": costs.optimal_cost,
        "recounted_cost": costs.ours.cost,  # the check of the casts has counted it
        "reward_per_allow_op": costs.reward,
        "placements": placements,
    }


def _op(row: OpRow) -> dict[str, Any]:
    row_facts = vars(portable_row(row))
    origin = os.path.basename(row.origin)
    return {key: row_facts[key] for key in _OP_KEYS} | {"origin": origin}


def to_networkx(report: Document) -> nx.DiGraph:
    """The rewritten graphs as one directed graph from producers to readers.

    A node is called "<graph>/<name>".  Attributes: `graph`, `name`, `kind` ("input",
    "op", "weight cast", "down cast", "up cast", "use", "output"), `op`, `precision` (of
    the result; "" if the result is no float), `category`, `reason`, `module` and
    `source` ("" where unknown).
    """
    whole = nx.DiGraph()
    for section in report.sections:
        rows = {row.name: row for row in section.ops}
        casts = {row.name: row for row in section.casts}
        for node in section.rewritten.gm.graph.nodes:
            key, row, cast = f"{section.key}/{node.name}", rows.get(node.name), None
            kind, reason = _KINDS.get(node.op, "op"), row.reason if row else ""
            if node.name in casts:
                cast = casts[node.name]
                kind = f"{cast.kind} cast"
                reason = f"{cast.value} is read in {cast.dtype}"
            elif is_use(node) and node.name not in section.before:
                kind = "use"
                reason = (
                    "joins the uses of a cast, so that gradients are summed in fp32"
                )
            whole.add_node(
                key,
                graph=section.key,
                name=node.name,
                kind=kind,
                op=row.op if row else target_name(node),
                precision=precision_of(node),
                category=row.category if row else "",
                reason=reason,
                module=row.module if row else "",
                source=row.source if row else "",
            )
            for operand in node.all_input_nodes:
                whole.add_edge(f"{section.key}/{operand.name}", key)
    return whole


def precision_of(node: fx.Node) -> str:
    """The short name of the dtype of the first float tensor of a result, or ""."""
    values = tensors_of(node.meta.get("val"))
    floats = (short_name(v.dtype) for v in values if v.is_floating_point())
    return next(floats, "")


def to_dot(report: Document) -> str:
    """The rewritten graphs in Graphviz's language, one cluster each."""
    whole = to_networkx(report)
    clusters: dict[str, list[str]] = {section.key: [] for section in report.sections}
    for name, data in whole.nodes(data=True):
        is_cast = data["kind"].endswith("cast")
        colour = _CAST_COLOUR if is_cast else _COLOURS.get(data["precision"], "white")
        words = [data["name"], f"{data['precision']} {data['category']}".strip()]
        label = "\n".join(word for word in words if word)
        shape = "ellipse" if is_cast else "box"
        clusters[data["graph"]].append(
            f"    {_quoted(name)} [label={_quoted(label)}, shape={shape}, "
            f'fillcolor="{colour}", tooltip={_quoted(data["reason"])}];'
        )
    lines = ["digraph autoamp {", "  node [shape=box, style=filled];"]
    for number, (key, nodes) in enumerate(clusters.items()):
        lines.append(f"  subgraph cluster_{number} {{")
        lines.append(f"    label={_quoted(f'graph {key}')};")
        lines += [*nodes, "  }"]
    lines.extend(f"  {_quoted(a)} -> {_quoted(b)};" for a, b in whole.edges)
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
