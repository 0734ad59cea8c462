"""The page of a report: its data, which the page holds as JSON, and the one HTML file.

Names and source lines of users reach the page as JSON only.  No text inside the data
can end the element that holds the data, because every `<` is written as an escape.  The
page's content security policy names the page's own scripts by their hashes, so that no
other script runs.

Of the keys of the data, those that do not explain themselves are

- `answers`: the answers of `print(report)`, in the same words and figures; `gains` is
  null where nothing was converted, and `verdict` is empty where something runs low;
- `graphs`: one entry per captured graph and per body, whose `key` is "0" or "0/body_0";
  wherever it names a node, it has the index of the node in its `nodes`:

  - `groups`: the boxes, parents before children; `parent` is an index, -1 for none;
  - `nodes`: in graph order; `before` and `after` are null in a graph that lacks the
    node; a node without a `decision` has a `note`, a sentence that begins behind its
    subject, the node; `body` is the key of the body that a node names, or ""; what
    `is_plumbing` is hidden at first;
  - `tables`: the figures of the graph; `placements` have the predicted cost of each,
    and what it is `extra` to the placement in force.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from autoamp.dtypes import LOW_DTYPES
from autoamp.messages import (
    attempt,
    bytes_text,
    counted,
    printable_line,
    seconds_text,
    shorten,
)
from autoamp.passes.report_rows import FP32, CastRow, OpRow, Section
from autoamp.reports.figures import Document, Headline, stayed_groups
from autoamp.reports.findings import (
    ERROR,
    FOOTNOTE,
    NOTHING_YET,
    WAYS,
    gains_of,
    memory_text,
    runs_low,
)
from autoamp.reports.page.costs import changes_of, costs_of_boxes
from autoamp.reports.page.drawing import Drawing
from autoamp.reports.terminal import cost_text
from autoamp.reports.why import MEANINGS, Flips

NOTHING = "Nothing is converted: the model runs in fp32, as before."

PAGE_SCHEMA = "autoamp.page"
PAGE_VERSION = 2


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
        drawn = attempt(title, graph, partial(left_out, title))
        if drawn is not None:
            graphs.append(drawn)
    return {
        "schema": PAGE_SCHEMA,
        "version": PAGE_VERSION,
        "model": report.label,
        "compute_dtype": report.compute_dtype,
        "dtypes": {"high": FP32, "low": list(LOW_DTYPES)},
        "runs": report.runs,
        "explained_for": report.explained_for,
        "answers": attempt(
            "the summary",
            lambda: _answers(report, advice()),
            lambda said: _no_answers(report, [said]),
        ),
        "skipped": skipped,
        "graphs": graphs,
    }


# -- the answers -----------------------------------------------------------------------


def _answers(report: Document, advice: Sequence[str]) -> dict[str, Any]:
    low = report.compute_dtype
    if low is None:
        return _no_answers(report, advice)
    headline = report.headline
    title, rows, sentence = gains_of(headline, low)
    return {
        "verdict": _verdict(report),
        "runs_low": [*runs_low(report, low)],
        "gains": {
            "title": title,
            "columns": list(WAYS),
            "rows": [list(row) for row in rows],
            "sentence": f"{sentence} {memory_text(report)}".strip(),
            "footnote": FOOTNOTE if rows else "",
            "error": ERROR,
        },
        "figures": {"before": _before(headline), "after": _after(headline)},
        "next": list(advice),
    }


def _no_answers(report: Document, advice: Sequence[str]) -> dict[str, Any]:
    """The answers where nothing was converted: the verdict, and what to do next."""
    none: dict[str, list[Any]] = {"before": [], "after": []}
    verdict = attempt("the verdict", lambda: _verdict(report), lambda said: [said])
    found = {"verdict": verdict, "runs_low": [], "gains": None}
    return {**found, "figures": none, "next": list(advice)}


MOST_REASONS = 3
"""The reasons that a verdict names."""


def _verdict(report: Document) -> list[str]:
    """Where nothing runs low: a sentence that says so, and the reasons, each in one."""
    if report.compute_dtype is None:
        if not report.skipped:
            return [f"{NOTHING_YET.capitalize()}."]
        reasons = [
            f"{shorten(what)}: {why.rstrip('.')}." for what, why in report.skipped
        ]
    elif report.headline.low_ops:
        return []
    else:
        reasons = [
            f"{counted(group.count, 'op')} in fp32: {group.reason.rstrip('.')}."
            for group in report.stayed
        ]
    more = len(reasons) - MOST_REASONS
    last = [f"And {counted(more, 'more reason')}."] if more > 0 else []
    return [NOTHING, *reasons[:MOST_REASONS], *last]


def _before(headline: Headline) -> list[dict[str, str]]:
    """The figures of the model in fp32."""
    figures = []
    if headline.seconds_fp32 is not None:
        work = "forward and backward" if headline.trains else "a forward"
        time = seconds_text(headline.seconds_fp32)
        figures.append(_figure(time, work, "in fp32, predicted"))
    if headline.trains:
        kept = bytes_text(headline.kept_fp32)
        figures.append(_figure(kept, "kept for the backward", "in fp32"))
    return [*figures, _figure("none", "error of rounding", "all is fp32")]


def _after(headline: Headline) -> list[dict[str, str]]:
    """Speed, memory and error of the converted model, beside `torch.autocast`."""
    figures = []
    if headline.speed_up is not None:
        over = f"{headline.speed_up_over_autocast:.2f}{_TIMES}"
        beside = f"{over} torch.autocast, predicted"
        speed_up = f"{headline.speed_up:.2f}{_TIMES}"
        figures.append(_figure(speed_up, "as fast as fp32", beside))
    if headline.trains:
        beside = f"torch.autocast {bytes_text(headline.kept_autocast)}, predicted"
        kept = bytes_text(headline.kept)
        figures.append(_figure(kept, "kept for the backward", beside))
    measured = "compare() measures it"
    return [*figures, _figure("—", "error of rounding", measured)]


_TIMES = "\N{MULTIPLICATION SIGN}"


def _figure(value: str, title: str, note: str) -> dict[str, str]:
    return {"value": value, "title": title, "note": note}


# -- one graph -------------------------------------------------------------------------

_OF_A_CAST = ("kind", "value", "dtype", "bytes", "every_call", "compiled")
_OF_AN_ISLAND = ("reasons", "modules", "bytes", "casts", "is_between")


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
        nodes[cast.name]["cast"] = {key: getattr(cast, key) for key in _OF_A_CAST}
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
            {
                "nodes": [index[name] for name in island.ops],
                "decided_by": [index[name] for name in island.decided_by],
                **{key: getattr(island, key) for key in _OF_AN_ISLAND},
            }
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
        "reason": row.choice or "because of this rule",
        "heading": row.heading,
        "listed": row.listed,
        "bytes": row.bytes,
        "cost": row.cost,
        "cost_fp32": row.cost_fp32,
    }


def _tables(section: Section, index: Mapping[str, int]) -> dict[str, Any]:
    costs = section.costs
    ours = costs.ours
    return {
        "ops": [
            {"category": c, "meaning": MEANINGS[c], "low": low, "fp32": high}
            for c, low, high in section.categories
        ],
        "casts": _casts(section.casts),
        "placements": [
            {
                "title": title,
                "estimate": each.estimate,
                "extra": each.estimate - ours.estimate,
                "kept": each.kept,
                "allow_in_fp32": each.allow_in_fp32,
            }
            for title, each in costs.titled
        ],
        "device": costs.device,
        "cost": ours.cost,
        "optimal_cost": costs.optimal_cost,
        "for_bytes": costs.for_bytes,
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
    keys = ("kind", "dtype", "every_call")
    return [
        {
            **dict(zip(keys, key, strict=True)),
            "count": len(nbytes),
            "bytes": sum(nbytes),
        }
        for key, nbytes in sorted(sizes.items())
    ]


# -- the file --------------------------------------------------------------------------

SCRIPTS = (
    "data.js",
    "text.js",
    "layout.js",
    "columns.js",
    "stretch.js",
    "draw.js",
    "view.js",
    "map.js",
    "state.js",
    "heat.js",
    "address.js",
    "save.js",
    "copy.js",
    "panel.js",
    "module.js",
    "overview.js",
    "search.js",
    "keys.js",
    "start.js",
)
"""The script files, in order; together they are one script."""

_SLOT = re.compile(r"\{\{(\w+)\}\}")


def page_of(report: Document, advice: Callable[[], Sequence[str]]) -> str:
    """The page of a report, as the text of one HTML file."""
    return html_of(data_of(report, advice))


def html_of(data: dict[str, Any]) -> str:
    """The page of `data`: the template, style and script files, and the data."""
    folder = files(__package__)
    library = _text(folder / "vendor" / "dagre.min.js")
    parts = [_text(folder / "script" / name) for name in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "\n".join(parts) + "})();\n"
    style = _text(folder / "template" / "style.css")
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    # No text inside the data can end the `script` element that holds them.
    for mark, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(mark, escape)
    slots = {
        "title": html.escape(f"autoamp: {printable_line(data['model'], 200)}"),
        # Nothing is loaded, and only these scripts and this style run.
        "policy": (
            "default-src 'none'; base-uri 'none'; form-action 'none'; "
            f"script-src {_hashes([library, script])}; style-src {_hashes([style])}"
        ),
        "style": style,
        "library": library,
        "script": script,
        "data": text,
    }
    template = _text(folder / "template" / "page.html")
    # One walk over the template, so that no slot is looked for inside the data.
    return _SLOT.sub(lambda found: slots[found[1]], template)


def _text(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
