"""The data of the page: one plain document, which the page holds as JSON.

The document has the keys

- `schema`, `version`, `model`, `compute_dtype`, `runs`, `explained_for`;
- `answers`: as `answers.py` describes them;
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
    describe them), `cast` (null, or kind, value, dtype, bytes, every_call), `note` (for
    a node without a decision, a sentence that begins behind its subject, the node),
    `body` (the key of the body that the node names, or "") and `is_plumbing` (a running
    statistic or a counter, hidden at first);
  - `islands`: connected fp32 ops, with `nodes`, `decided_by` (indices), `reasons`,
    `modules`, `bytes`, `casts` and `is_between`;
  - `tables`: as `tables.py` describes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from autoamp.inspect.costs import Costs
from autoamp.inspect.flip import Flips
from autoamp.inspect.page.answers import Answered, answers_of
from autoamp.inspect.page.flips import MOST_WORK, flips_of
from autoamp.inspect.page.modules import modules_of
from autoamp.inspect.page.nodes import SectionNodes
from autoamp.inspect.page.roots import MOST_TRIES, remedies_of, roots_of
from autoamp.inspect.page.tables import tables_of
from autoamp.inspect.rows import Section, cast_rows, op_rows
from autoamp.inspect.sections.islands import Island
from autoamp.inspect.text import counted, shorten

SCHEMA = "autoamp.page"
SCHEMA_VERSION = 1


class Shown(Answered, Protocol):
    """The parts of a `Report` that are shown."""

    @property
    def label(self) -> str: ...
    @property
    def sections(self) -> Sequence[Section]: ...
    @property
    def costs(self) -> Sequence[Costs]: ...
    @property
    def islands(self) -> Sequence[Island]: ...
    @property
    def skipped(self) -> Sequence[tuple[str, str]]: ...


def document_of(content: Shown) -> dict[str, Any]:
    """The document of a report, the same in every process."""
    nodes = sum(len(s.rewritten.before.graph.nodes) for s in content.sections)
    # Each section gets its share of the solved placements, so that a report of many
    # graphs takes as long as a report of one.
    work = max(nodes, 1) * max(len(content.sections), 1)
    return {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "model": content.label,
        "compute_dtype": content.compute_dtype,
        "runs": content.runs,
        "explained_for": content.explained_for,
        "answers": answers_of(content),
        "skipped": [{"what": shorten(w), "why": why} for w, why in content.skipped],
        "graphs": [
            _graph(content, section, costs, work)
            for section, costs in zip(content.sections, content.costs, strict=True)
        ],
    }


def _graph(content: Shown, section: Section, costs: Costs, work: int) -> dict[str, Any]:
    ops, casts = op_rows(section), cast_rows(section)
    found = SectionNodes(section, content.label, ops, casts)
    islands = [
        _island(island, found.index)
        for island in content.islands
        if (island.graph, island.body) == (section.graph, section.body)
    ]
    most = MOST_WORK // work
    solver = Flips(section.rewritten)
    flips = flips_of(section, ops, solver, most)
    roots = roots_of(section, ops, found.index)
    remedies = remedies_of(section, ops, MOST_TRIES // work)
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
        "nodes": list(found.entries(changes)),
        "islands": islands,
        "tables": tables_of(section, ops, casts, costs, found.index),
    }


def _title(section: Section) -> str:
    nodes = counted(len(section.rewritten.before.graph.nodes), "node")
    if section.body:
        caller = f" ({section.caller})" if section.caller else ""
        return f"{section.body}{caller} of graph {section.graph}: {nodes}"
    return f"graph {section.key}: {nodes}"


def _island(island: Island, index: dict[str, int]) -> dict[str, Any]:
    return {
        "nodes": [index[name] for name in island.ops],
        "decided_by": [index[name] for name in island.decided_by],
        "reasons": list(island.reasons),
        "modules": list(island.modules),
        "bytes": island.bytes,
        "casts": island.casts,
        "is_between": island.is_between,
    }
