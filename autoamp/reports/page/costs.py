"""What the page says of the other precision, for each op and for each module.

For each cost the placement is solved again: for all ops of a graph of 3 000 nodes that
would take minutes.  So only the ops that move most bytes get a cost.

An op has a `flip`, whose `kind` is "exact", "never" (`why` is the reason) or "unknown"
(the cost was not affordable).  It has a `root` where type promotion leaves it
fp32: the node at the far end of the chain, a sentence on it, and the `chain` to the op.

A box has the cost of its ops in `fp32` and as `placed`, with the casts before them; and
what it would cost to `keep` all its ops in fp32, or to `lower` those that may be low;
null where no op would change.  `extra` is null where `why` forbids it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoamp.passes.decide.ceiling import low_under_autocast, root_of
from autoamp.passes.decide.verdict import CEILING
from autoamp.passes.report_rows import FP32, OpRow, Section
from autoamp.reports.page.drawing import Box
from autoamp.reports.why import (
    Flip,
    Flips,
    root_text,
)

MOST_WORK = 100_000
"""The limit on the placements solved for one page, times the nodes of the graphs.

One node of one placement takes about 11 microseconds, so the limit is about a second;
the costs of modules take as much again.
"""


def changes_of(
    section: Section, index: Mapping[str, int], solver: Flips, work: int
) -> dict[str, dict[str, Any]]:
    """What would change each op: its `flip` and `root`.

    Args:
        index: the place of each node on the page.
        work: the nodes of all graphs that the page shows, times their number.
    """
    free = [row for row in section.ops if not row.pinned]
    first = sorted(free, key=lambda row: -row.bytes)[: MOST_WORK // work]
    exact = {row.name for row in first}
    roots = _roots(section, index)
    changes = {}
    for row in section.ops:
        name = row.name
        change = row.pinned or (solver.of(name) if name in exact else None)
        flip = {"to": FP32 if row.is_low else section.low, **_flip(section, change)}
        changes[name] = {"flip": flip, "root": roots.get(name)}
    return changes


def _flip(section: Section, found: Flip | str | None) -> dict[str, Any]:
    if found is None:
        return {"kind": "unknown"}
    if isinstance(found, str):
        return {"kind": "never", "why": found}
    dtypes = {"up": FP32, "down": section.low}
    return {
        "kind": "exact",
        "extra": found.extra,
        "more_kept": found.more_kept,
        "more_allow_in_fp32": found.more_in_fp32,
        "appear": [[value, dtypes[way]] for value, way in found.appear],
        "vanish": [[value, dtypes[way]] for value, way in found.vanish],
        "along": list(found.along),
    }


def _roots(section: Section, index: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    classified = section.rewritten.classified
    low = low_under_autocast(classified)
    roots: dict[str, dict[str, Any]] = {}
    for row in section.ops:
        if row.is_low or classified.verdicts[row.name].origin != CEILING:
            continue
        root = root_of(row.name, classified, low)
        # A weight has no precision to be chosen, so the op that reads it is the root.
        is_value = root.source in classified.facts.constants
        first = root.reader if is_value else root.source
        chain = [first, *root.path, row.name]
        roots[row.name] = {
            "node": index[first],
            "said": root_text(section, root),
            "chain": [index[name] for name in dict.fromkeys(chain)],
        }
    return roots


def costs_of_boxes(
    section: Section,
    boxes: Sequence[Box],
    box_of: Mapping[str, int],
    solver: Flips,
    work: int,
) -> list[dict[str, Any]]:
    """The costs of each box; the first ones, the outermost, as far as affordable."""
    most = MOST_WORK // work
    fp32, placed = [0] * len(boxes), [0] * len(boxes)
    members: list[list[OpRow]] = [[] for _ in boxes]
    for row in section.ops:
        box = box_of[row.name]
        fp32[box] += row.cost_fp32
        placed[box] += row.cost
        members[box].append(row)
    for box, cost in _casts(section, box_of):
        placed[box] += cost
    for box in reversed(range(1, len(boxes))):  # children come after their parents
        parent = boxes[box].parent
        members[parent] += members[box]
        fp32[parent] += fp32[box]
        placed[parent] += placed[box]
    costs = []
    for box, rows in enumerate(members):
        entry: dict[str, Any] = {"fp32": fp32[box], "placed": placed[box]}
        free = [row for row in rows if not row.pinned]
        for key, low in (("keep", False), ("lower", True)):
            changed, entry[key] = sum(row.is_low != low for row in free), None
            if changed and most > 0:
                most -= 1
                change = solver.of_all([row.name for row in free], low=low)
                why = change if isinstance(change, str) else ""
                extra = None if isinstance(change, str) else change.extra
                entry[key] = {"ops": changed, "extra": extra, "why": why}
        costs.append(entry)
    return costs


def _casts(section: Section, box_of: Mapping[str, int]) -> list[tuple[int, int]]:
    """The box of the first op that reads each cast, and the cost of the cast."""
    assignment = section.rewritten.assignment
    costs = []
    for group in assignment.problem.groups:
        cost = group.cost(assignment.low.__contains__)
        if cost:
            is_low = group.value in assignment.low
            readers = [r for r in group.readers if (r in assignment.low) != is_low]
            homes = [box_of[n] for n in (*readers, group.value) if n in box_of]
            costs.append((homes[0] if homes else 0, cost))
    return costs
