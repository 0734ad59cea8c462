"""The data of the page, which the page holds as JSON.

The data have the keys

- `schema`, `version`, `model`, `compute_dtype`, `runs`, `explained_for`;
- `dtypes`: the names of the dtypes, `high` ("fp32") and the list `low` ("fp16", ...);
- `answers`: as `answers.py` describes them;
- `budget`: null without a budget for error, else `sentences`, `limits` by measure,
  `points` and `marks` (each with `share` of fp32's time, `errors`, `low` and `name`),
  and `chosen`, the place of the chosen point;
- `skipped`: the parts that were not converted, each with `what` and `why`;
- `graphs`: one entry per captured graph and per body, each with

  - `key` ("0", "0/body_0"), `title`, `compute_dtype`;
  - `groups`: the boxes, each with `path`, `label`, `parent` (an index, -1 for none) and
    `is_part`, and `costs` as `modules.py` describes them; a parent stands before its
    children;
  - `nodes`: one entry per node, in graph order, with `name`, `kind` ("op", "cast",
    "weight", "input", "constant", "state", "body", "use", "output"), `op`, `title`,
    `group` (an index), `module`, `source`, `before` and `after` (null in a graph that
    lacks the node, else `operands` as indices, `values` as "bf16 [2, 8]", and
    `precision`), `decision` (null, or category, precision, rule, origin, reason,
    heading, listed, bytes, `flip` as `flips.py` and `root` and `remedy` as `roots.py`
    describe them), `cast` (null, or kind, value, dtype, bytes, every_call, compiled as
    `CastRow` describes it), `note` (for a node without a decision, a sentence that
    begins behind its subject, the node), `body` (the key of the body that the node
    names, or "") and `is_plumbing` (whether the node is a running statistic or a
    counter, which is hidden at first);
  - `islands`: connected fp32 ops, with `nodes`, `decided_by` (indices), `reasons`,
    `modules`, `bytes`, `casts` and `is_between`;
  - `tables`: as `tables.py` describes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES, short_name
from autoamp.inspect.document import Document
from autoamp.inspect.flip import Flips
from autoamp.inspect.guarded import attempt
from autoamp.inspect.nodes.node import Node, Side
from autoamp.inspect.page.answers import answers_of, no_answers
from autoamp.inspect.page.flips import MOST_WORK, flips_of
from autoamp.inspect.page.modules import modules_of
from autoamp.inspect.page.roots import MOST_TRIES, remedies_of, roots_of
from autoamp.inspect.page.tables import tables_of
from autoamp.inspect.rows import CastRow, OpRow, Section
from autoamp.inspect.sections.islands import Island
from autoamp.inspect.text import counted, shorten
from autoamp.place.frontier import Frontier, Point

SCHEMA = "autoamp.page"
SCHEMA_VERSION = 1


def data_of(document: Document, advice: Callable[[], Sequence[str]]) -> dict[str, Any]:
    """The data of the page, the same in every process."""
    nodes = sum(len(section.before) for section in document.sections)
    # Each section gets its share of the solved placements, so that a report on many
    # graphs takes as long as a report on one graph.
    work = max(nodes, 1) * max(len(document.sections), 1)
    skipped = [{"what": shorten(w), "why": why} for w, why in document.skipped]
    graphs: list[dict[str, Any]] = []
    for at, section in enumerate(document.sections):
        title = f"graph {section.key}"
        make, instead = partial(_graph, document, at, work), partial(_left_out, title)
        made = attempt(title, make, instead)
        (graphs if "key" in made else skipped).append(made)
    return {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "model": document.label,
        "compute_dtype": document.compute_dtype,
        "dtypes": {"high": short_name(HIGH_DTYPE), "low": list(LOW_DTYPES)},
        "runs": document.runs,
        "explained_for": document.explained_for,
        "answers": attempt(
            "the summary",
            lambda: answers_of(document, advice()),
            lambda said: no_answers([said]),
        ),
        "budget": _budget(document.frontier),
        "skipped": skipped,
        "graphs": graphs,
    }


def _budget(found: Frontier | None) -> dict[str, Any] | None:
    if found is None:
        return None

    def point(each: Point) -> dict[str, Any]:
        share = each.nanoseconds / (found.fp32.nanoseconds or 1.0)
        return {
            "share": share,
            "errors": {m: e for m, e in each.errors.items() if math.isfinite(e)},
            "low": each.low,
            "name": each.name,
        }

    return {
        "sentences": found.sentences(),
        "limits": dict(found.limits),
        "points": [point(each) for each in found.points],
        "marks": [point(each) for each in found.marks],
        "chosen": found.chosen,
    }


def _left_out(title: str, said: str) -> dict[str, Any]:
    """The entry under `skipped` of a graph that the page cannot show."""
    return {"what": title, "why": said}


def _graph(document: Document, at: int, work: int) -> dict[str, Any]:
    section, found = document.sections[at], document.nodes[at]
    index = found.index
    most = MOST_WORK // work
    solver = Flips(section.rewritten)
    flips = flips_of(section, solver, most)
    roots = roots_of(section, index)
    remedies = remedies_of(section, MOST_TRIES // work)
    changes = {
        name: {"flip": f, "root": roots.get(name), "remedy": remedies.get(name)}
        for name, f in flips.items()
    }
    modules = modules_of(section, found.groups, found.group_of, solver, most)
    return {
        "key": section.key,
        "title": _title(section),
        "compute_dtype": section.low,
        "groups": [
            {**asdict(group), "costs": each}
            for group, each in zip(found.groups, modules, strict=True)
        ],
        "nodes": [
            _node(node, index, changes.get(node.name, {})) for node in found.entries
        ],
        "islands": [
            _island(island, index)
            for island in document.islands
            if (island.graph, island.body) == (section.graph, section.body)
        ],
        "tables": tables_of(section, index),
    }


def _node(
    node: Node, index: Mapping[str, int], changes: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **vars(node),
        "before": _side(node.before, index),
        "after": _side(node.after, index),
        "decision": {**_decision(node.decision), **changes} if node.decision else None,
        "cast": _cast(node.cast) if node.cast else None,
    }


def _side(side: Side | None, index: Mapping[str, int]) -> dict[str, Any] | None:
    if side is None:
        return None
    return {
        "operands": [index[name] for name in side.operands],
        "values": list(side.values),
        "precision": side.precision,
    }


def _decision(row: OpRow) -> dict[str, Any]:
    return {
        "category": row.category,
        "precision": row.precision,
        "rule": row.rule,
        "origin": shorten(row.origin),
        "reason": row.choice or "by that rule",
        "heading": row.heading,
        "listed": row.listed,
        "bytes": row.bytes,
    }


def _cast(row: CastRow) -> dict[str, Any]:
    keys = ("kind", "value", "dtype", "bytes", "every_call", "compiled")
    return {key: getattr(row, key) for key in keys}


def _title(section: Section) -> str:
    nodes = counted(len(section.before), "node")
    if section.body:
        caller = f" ({section.caller})" if section.caller else ""
        return f"{section.body}{caller} of graph {section.graph}: {nodes}"
    return f"graph {section.key}: {nodes}"


def _island(island: Island, index: Mapping[str, int]) -> dict[str, Any]:
    return {
        "nodes": [index[name] for name in island.ops],
        "decided_by": [index[name] for name in island.decided_by],
        "reasons": list(island.reasons),
        "modules": list(island.modules),
        "bytes": island.bytes,
        "casts": island.casts,
        "is_between": island.is_between,
    }
