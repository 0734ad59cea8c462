"""The data of the page, which the page holds as JSON.

The data have the keys

- `schema`, `version`, `model`, `compute_dtype`, `runs`, `explained_for`;
- `dtypes`: the names of the dtypes, `high` ("fp32") and the list `low` ("fp16", ...);
- `answers`: the answers of `print(report)`, in the same words and figures:

  - `runs_low`: sentences on the ops in low precision, the casts and the graphs;
  - `gains`: null where nothing was converted, else `title`, `columns`, `rows` (a name
    and one text for each column), `sentence`, `footnote` ("" without rows) and `error`;
  - `figures`: for "before" and "after" the pass the main figures, each with `value`,
    `title` and `note`;
  - `next`: sentences on what to do next;

- `budget`: null without a budget for error, else `sentences`, `limits` by measure,
  `points` and `marks` (each with `share` of fp32's time, `errors`, `low` and `name`),
  and `chosen`, the place of the chosen point;
- `skipped`: the parts that were not converted, each with `what` and `why`;
- `graphs`: one entry per captured graph and per body, each with

  - `key` ("0", "0/body_0"), `title`, `compute_dtype`;
  - `groups`: the boxes, each with `path`, `label`, `parent` (an index, -1 for none) and
    `is_part`, and `costs` as `costs.py` describes them; a parent stands before its
    children;
  - `nodes`: one entry per node, in graph order, with `name`, `kind` ("op", "cast",
    "weight", "input", "constant", "state", "body", "use", "output"), `op`, `title`,
    `group` (an index), `module`, `source`, `before` and `after` (null in a graph that
    lacks the node, else `operands` as indices, `values` as "bf16 [2, 8]", and
    `precision`), `decision` (null, or category, precision, rule, origin, reason,
    heading, listed, bytes, and `flip`, `root` and `remedy` as `costs.py` describes
    them), `cast` (null, or kind, value, dtype, bytes, every_call, compiled as `CastRow`
    describes it), `note` (for a node without a decision, a sentence that begins behind
    its subject, the node), `body` (the key of the body that the node names, or "") and
    `is_plumbing` (whether the node is a running statistic or a counter, which is hidden
    at first);
  - `islands`: connected fp32 ops, with `nodes`, `decided_by` (indices), `reasons`,
    `modules`, `bytes`, `casts` and `is_between`;
  - `tables`: `ops`, per category the number of ops in `low` precision and in `fp32`,
    with the `meaning` of the category; `casts`, per kind and dtype the `count` and the
    `bytes`, and whether the casts run at `every_call`; `placements`, the predicted cost
    of each: `title`, `estimate`, `extra` (against the placement in force) and
    `allow_in_fp32`; `unit` ("0.1 ns" or "bytes"), `device`, `cost`, `optimal_cost`,
    `has_reward`; and `stayed`, the reasons for fp32 in the order of `print(report)`,
    each with the `nodes` (indices) and their `cost`, a text.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from autoamp.dtypes import LOW_DTYPES
from autoamp.inspect.changes import Flips
from autoamp.inspect.figures import Document, Headline, Island, stayed_groups
from autoamp.inspect.findings import ERROR, FOOTNOTE, WAYS, gains_of, runs_low
from autoamp.inspect.page.costs import changes_of, costs_of_boxes
from autoamp.inspect.page.drawing import Drawing
from autoamp.inspect.rows import Section
from autoamp.inspect.terminal import cost_text
from autoamp.inspect.text import (
    attempt,
    bytes_text,
    counted,
    seconds_text,
    shorten,
)
from autoamp.inspect.why import MEANINGS
from autoamp.place.frontier import Frontier, Point
from autoamp.saved.rows import FP32, CastRow, OpRow

SCHEMA = "autoamp.page"
SCHEMA_VERSION = 1


def data_of(report: Document, advice: Callable[[], Sequence[str]]) -> dict[str, Any]:
    """The data of the page, the same in every process."""
    nodes = sum(len(section.before) for section in report.sections)
    # Each section gets its share of the solved placements, so that a report on many
    # graphs takes as long as a report on one graph.
    work = max(nodes, 1) * max(len(report.sections), 1)
    skipped = [{"what": shorten(w), "why": why} for w, why in report.skipped]
    graphs: list[dict[str, Any]] = []

    def left_out(title: str, said: str) -> None:
        skipped.append({"what": title, "why": said})

    for section in report.sections:
        title = f"graph {section.key}"
        graph = partial(_graph, report, section, work)
        made = attempt(title, graph, partial(left_out, title))
        if made is not None:
            graphs.append(made)
    return {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "model": report.label,
        "compute_dtype": report.compute_dtype,
        "dtypes": {"high": FP32, "low": list(LOW_DTYPES)},
        "runs": report.runs,
        "explained_for": report.explained_for,
        "answers": attempt(
            "the summary",
            lambda: _answers(report, advice()),
            lambda said: _no_answers([said]),
        ),
        "budget": _budget(report.frontier),
        "skipped": skipped,
        "graphs": graphs,
    }


# -- the answers -----------------------------------------------------------------------


def _answers(report: Document, advice: Sequence[str]) -> dict[str, Any]:
    low = report.compute_dtype
    if low is None:
        return _no_answers(advice)
    found = report.headline
    gains = gains_of(found, low)
    return {
        "runs_low": [*runs_low(report, low)],
        "gains": {
            "title": gains.title,
            "columns": list(WAYS),
            "rows": [list(row) for row in gains.rows],
            "sentence": gains.sentence,
            "footnote": FOOTNOTE if gains.rows else "",
            "error": ERROR,
        },
        "figures": {"before": _before(found), "after": _after(found)},
        "next": list(advice),
    }


def _no_answers(advice: Sequence[str]) -> dict[str, Any]:
    """The answers where nothing was converted: what to do next, and nothing else."""
    none: dict[str, list[Any]] = {"before": [], "after": []}
    return {"runs_low": [], "gains": None, "figures": none, "next": list(advice)}


def _before(found: Headline) -> list[dict[str, str]]:
    """The figures of the model in fp32."""
    figures = []
    if found.seconds_fp32 is not None:
        work = "forward and backward" if found.trains else "a forward"
        time = seconds_text(found.seconds_fp32)
        figures.append(_figure(time, work, "in fp32, predicted"))
    if found.trains:
        kept = bytes_text(found.kept_fp32)
        figures.append(_figure(kept, "kept for the backward", "in fp32"))
    return [*figures, _figure("none", "error of rounding", "all is fp32")]


def _after(found: Headline) -> list[dict[str, str]]:
    """Speed, memory and error of the converted model, beside `torch.autocast`."""
    figures = []
    if found.speed_up is not None:
        over = f"{found.speed_up_over_autocast:.2f}{_TIMES}"
        beside = f"{over} torch.autocast, predicted"
        speed_up = f"{found.speed_up:.2f}{_TIMES}"
        figures.append(_figure(speed_up, "as fast as fp32", beside))
    if found.trains:
        beside = f"torch.autocast {bytes_text(found.kept_autocast)}, predicted"
        kept = bytes_text(found.kept)
        figures.append(_figure(kept, "kept for the backward", beside))
    measured = "compare() measures it"
    return [*figures, _figure("—", "error of rounding", measured)]


_TIMES = "\N{MULTIPLICATION SIGN}"


def _figure(value: str, title: str, note: str) -> dict[str, str]:
    return {"value": value, "title": title, "note": note}


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


# -- one graph -------------------------------------------------------------------------


def _graph(report: Document, section: Section, work: int) -> dict[str, Any]:
    drawing = Drawing(section, report.label)
    index, boxes = drawing.index, drawing.boxes
    solver = Flips(section.rewritten)
    changes = changes_of(section, index, solver, work)
    costs = costs_of_boxes(section, boxes, drawing.box_of, solver, work)
    nodes = {name: drawing.node(name) for name in index}
    for row in section.ops:
        nodes[row.name]["decision"] = _decision(row) | changes[row.name]
    for cast in section.casts:
        keys = ("kind", "value", "dtype", "bytes", "every_call", "compiled")
        nodes[cast.name]["cast"] = {key: getattr(cast, key) for key in keys}
    count, title = counted(len(section.before), "node"), f"graph {section.key}"
    if section.body:
        caller = f" ({section.caller})" if section.caller else ""
        title = f"{section.body}{caller} of graph {section.graph}"
    return {
        "key": section.key,
        "title": f"{title}: {count}",
        "compute_dtype": section.low,
        "groups": [
            {**asdict(box), "costs": cost}
            for box, cost in zip(boxes, costs, strict=True)
        ],
        "nodes": list(nodes.values()),
        "islands": [
            _island(island, index)
            for island in report.islands
            if (island.graph, island.body) == (section.graph, section.body)
        ],
        "tables": _tables(section, index),
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


def _tables(section: Section, index: Mapping[str, int]) -> dict[str, Any]:
    costs = section.costs
    ours = costs.ours
    counts = Counter((row.category, row.is_low) for row in section.ops)
    return {
        "ops": [
            {"category": c, "meaning": meaning, "low": counts[c, True], "fp32": high}
            for c, meaning in MEANINGS.items()
            if (high := counts[c, False]) or counts[c, True]
        ],
        "casts": _casts(section.casts),
        "placements": [
            {
                "title": title,
                "estimate": costs.placements[name].estimate,
                "extra": costs.placements[name].estimate - ours.estimate,
                "allow_in_fp32": costs.placements[name].allow_in_fp32,
            }
            for name, title in costs.titles.items()
        ],
        "unit": costs.unit,
        "device": costs.device,
        "cost": ours.cost,
        "optimal_cost": costs.optimal_cost,
        "has_reward": bool(costs.reward),
        "stayed": [
            {
                "reason": group.reason,
                "nodes": [index[row.name] for row in group.rows],
                "cost": cost_text(group),
            }
            for group in stayed_groups([section])
        ],
    }


def _casts(casts: Sequence[CastRow]) -> list[dict[str, Any]]:
    sizes: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
    for row in casts:
        sizes[row.kind, row.dtype, row.every_call].append(row.bytes)
    return [
        {
            "kind": kind,
            "dtype": dtype,
            "every_call": every_call,
            "count": len(found),
            "bytes": sum(found),
        }
        for (kind, dtype, every_call), found in sorted(sizes.items())
    ]
