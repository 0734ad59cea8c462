"""Two pages as one: the old report's graphs beside the new one's, and what changed.

The input is the data that two pages hold; the output is the data of one page, whose
graphs hold both versions, each in a box of its own.  Beside the keys of `data.py`,
`diff` has the two files and sentences on the differences; a graph has its `changes`; a
node and a group have their `twin` in the other version, and a node its `change`.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autoamp.errors import OptionError
from autoamp.messages import counted, printable_line
from autoamp.passes.rows import SCHEMA, VERSION, SavedGraph, SavedReport
from autoamp.passes.saved import Diff, diff, paired_graphs, paired_ops, report_in
from autoamp.report.page.data import PAGE_SCHEMA, PAGE_VERSION, html_of

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)

_GIVE = (
    "write it with `autoamp explain MODEL --html FILE` or report.to_html(FILE); a "
    "report in JSON has the ops, and no graph to draw"
)

_Data = dict[str, Any]


def page_at(path: str) -> _Data:
    """The data of the page in a file.

    Raises:
        OptionError: the file cannot be read, or is no page of this version.
    """
    shown = printable_line(path, 300)
    try:
        found = _DATA.search(Path(path).read_text(encoding="utf-8"))
        data = json.loads(found[1]) if found else None
    except (OSError, ValueError) as error:
        raise OptionError(f"{shown}: cannot be read as a page ({error})") from None
    if not isinstance(data, dict) or data.get("schema") != PAGE_SCHEMA:
        raise OptionError(f"{shown}: it is not the page of a report; {_GIVE}")
    if data.get("version") != PAGE_VERSION:
        raise OptionError(
            f"{shown}: another version of autoamp wrote this page; write it again: "
            "autoamp explain MODEL --html FILE"
        )
    if "diff" in data:
        raise OptionError(f"{shown}: it shows two reports; give the page of one")
    return data


def report_of_page(path: str, data: _Data) -> SavedReport:
    """The ops and casts of a page, as a report that can be compared.

    Raises:
        OptionError: the data is not that of a page.
    """
    try:
        rows = _rows(data)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise OptionError(
            f"{path}: the data of the page is damaged ({error!r})"
        ) from None
    return report_in(printable_line(path, 300), rows)


def _rows(data: _Data) -> _Data:
    found: _Data = {"schema": SCHEMA, "version": VERSION, "ops": [], "casts": []}
    found |= {"model": data["model"], "compute_dtype": data["compute_dtype"]}
    found["graphs"] = []
    for graph in data["graphs"]:
        number, _, body = graph["key"].partition("/")
        where = {"graph": int(number), "body": body}
        found["graphs"].append({**where, "device": graph["tables"]["device"]})
        for node in graph["nodes"]:
            if node["cast"]:
                found["casts"].append({**where, "name": node["name"], **node["cast"]})
            if node["decision"]:
                decision = node["decision"]
                reason = {"reason": f"{decision['rule']}; {decision['reason']}"}
                found["ops"].append({**node, **where, **decision, **reason})
    return found


def side_by_side(old: str, new: str) -> str:
    """The page that shows the pages in two files side by side.

    Raises:
        OptionError: a file is not the page of a report.

    Example:
        >>> import os, tempfile, torch, autoamp
        >>> from autoamp.report.page.pair import side_by_side
        >>> def page(name, **options):
        ...     path = os.path.join(tempfile.mkdtemp(), name)
        ...     options |= {"precision": "bf16", "do_no_harm": False}
        ...     model, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
        ...     _ = autoamp.explain(model, x, **options).to_html(path)
        ...     return path
        >>> both = side_by_side(page("a.html"), page("b.html", deny=["linear"]))
        >>> "1 op of 1 changed precision" in both
        True
    """
    pages = page_at(old), page_at(new)
    reports = [report_of_page(*each) for each in zip((old, new), pages, strict=True)]
    return html_of(_paired(*pages, *reports))


def _paired(old: _Data, new: _Data, first: SavedReport, second: SavedReport) -> _Data:
    by_key = [{graph["key"]: graph for graph in data["graphs"]} for data in (old, new)]
    found = diff(first, second)
    titles = [_title(first.path, second.path), _title(second.path, first.path)]
    graphs = [
        _both(
            titles,
            (by_key[0][a.key], a) if a else None,
            (by_key[1][b.key], b) if b else None,
        )
        for a, b in paired_graphs(first.graphs, second.graphs)
    ]
    said = [*_sentences(found)]
    answers = {"verdict": [], "runs_low": said, "gains": _gains(old, new, titles)}
    return {
        **new,
        "model": f"{old['model']}, {titles[0]} and {titles[1]}",
        "answers": {**new["answers"], **answers},
        "diff": {"old": titles[0], "new": titles[1], "sentences": said},
        "graphs": graphs,
    }


def _title(path: str, other: str) -> str:
    """The file of one side, with its folder where both files have one name."""
    name = os.path.basename(path)
    return path if name == os.path.basename(other) else name


def _sentences(found: Diff) -> Iterator[str]:
    """What differs, in words."""
    if found.is_empty:
        yield f"No difference in {counted(found.same, 'op')}."
        return
    every = found.same + len(found.changed)
    yield f"{counted(len(found.changed), 'op')} of {every:,} changed precision."
    added, removed = len(found.casts_added), len(found.casts_removed)
    if added or removed:
        yield f"{counted(added, 'cast')} were added, and {removed:,} removed."
    if found.appeared or found.vanished:
        yield (
            f"{counted(len(found.appeared), 'op')} appeared, and "
            f"{len(found.vanished):,} vanished."
        )
    if found.compute_dtypes[0] != found.compute_dtypes[1]:
        dtypes = [each or "none" for each in found.compute_dtypes]
        yield f"The compute dtype was {dtypes[0]} and is {dtypes[1]}."


def _gains(old: _Data, new: _Data, titles: list[str]) -> _Data | None:
    """The predicted figures of both, in one table; None where one has none."""
    gains = old["answers"]["gains"], new["answers"]["gains"]
    if not all(gains):
        return None
    before = {name: texts[-1] for name, *texts in gains[0]["rows"]}
    rows = [
        [name, before.get(name, ""), texts[-1]] for name, *texts in gains[1]["rows"]
    ]
    return {**gains[1], "columns": titles, "rows": rows, "footnote": "", "error": ""}


_Half = tuple[_Data, SavedGraph] | None


def _both(titles: list[str], old: _Half, new: _Half) -> _Data:
    """One graph that holds two versions of a graph, or the one there is."""
    halves = [(t, half) for t, half in zip(titles, (old, new), strict=True) if half]
    last = halves[-1][1][0]
    costs = [half["groups"][0]["costs"] for _, (half, _) in halves]
    sums = {key: sum(cost[key] for cost in costs) for key in ("fp32", "placed")}
    root = {**last["groups"][0], "label": "", "parent": -1}
    merged: _Data = {
        **last,
        "groups": [{**root, "costs": {**sums, "keep": None, "lower": None}}],
        "nodes": [],
        "islands": [],
        "changes": [],
    }
    stayed: list[_Data] = []
    categories: dict[str, _Data] = {}
    starts = []
    for title, (half, _) in halves:
        at_node, at_group = len(merged["nodes"]), len(merged["groups"])
        starts.append((at_node, at_group))
        moved = _moved(half, at_node, at_group)
        moved["groups"][0] |= {"label": title, "parent": 0}
        for key in ("groups", "nodes", "islands"):
            merged[key] += moved[key]
        stayed += moved["tables"]["stayed"]
        categories |= {row["category"]: row for row in half["tables"]["ops"]}
    merged["tables"] = {
        **last["tables"],
        "stayed": stayed,
        "ops": [*categories.values()],
    }
    if old and new:
        _mark(merged, (old, new), starts)
    return merged


def _moved(graph: _Data, at_node: int, at_group: int) -> _Data:
    """A copy of a graph, whose nodes and groups begin at other numbers."""
    copy: _Data = json.loads(json.dumps(graph))

    def shift(numbers: list[int]) -> list[int]:
        return [number + at_node for number in numbers]

    for group in copy["groups"]:
        group["parent"] += at_group
    for node in copy["nodes"]:
        node["group"] += at_group
        for side in filter(None, (node["before"], node["after"])):
            side["operands"] = shift(side["operands"])
        root = node["decision"] and node["decision"]["root"]
        if root:
            root |= {"node": root["node"] + at_node, "chain": shift(root["chain"])}
    for each in copy["islands"]:
        each["nodes"], each["decided_by"] = map(
            shift, (each["nodes"], each["decided_by"])
        )
    for each in copy["tables"]["stayed"]:
        each["nodes"] = shift(each["nodes"])
    return copy


def _mark(
    merged: _Data,
    halves: tuple[tuple[_Data, SavedGraph], tuple[_Data, SavedGraph]],
    starts: list[tuple[int, int]],
) -> None:
    """Gives nodes and groups their twins, and nodes their change."""
    places = [
        {node["name"]: start + n for n, node in enumerate(half["nodes"])}
        for (half, _), (start, _) in zip(halves, starts, strict=True)
    ]
    nodes, groups = merged["nodes"], merged["groups"]
    for a, b in paired_ops(halves[0][1], halves[1][1]):
        pair = [
            None if op is None else place[op.name]
            for op, place in zip((a, b), places, strict=True)
        ]
        low = [op.precision if op else "" for op in (a, b)]
        change = {"old": low[0], "new": low[1]} if low[0] != low[1] else None
        for here, twin in (pair, pair[::-1]):
            if here is not None:
                nodes[here] |= {"twin": twin, "change": change}
        if change:
            merged["changes"].append({"old": pair[0], "new": pair[1], **_text(low)})
    # Folds may differ, so that a module is known by its path, not by its label.
    seen: dict[tuple[str, int], int] = {}
    counts: Counter[tuple[bool, str]] = Counter()
    for number, group in enumerate(groups[1:], 1):
        key = number >= starts[1][1], group["path"]
        counts[key] += 1
        twin = seen.setdefault((group["path"], counts[key]), number)
        if twin != number:
            group["twin"], groups[twin]["twin"] = twin, number


def _text(low: list[str]) -> Mapping[str, str]:
    """The words of a change."""
    if not all(low):
        return {"text": "appeared" if low[1] else "vanished"}
    return {"text": f"{low[0]} \N{RIGHTWARDS ARROW} {low[1]}"}
