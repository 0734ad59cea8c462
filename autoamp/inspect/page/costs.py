"""What the page says of the other precision, for each op and for each module.

For an exact cost the placement is solved again: for all ops of a graph of 3 000 nodes
that would take minutes.  So the ops that move most bytes get the exact cost; every
other op gets an upper bound, the cost of changing that op alone.

The keys of an op are `flip`, `root` and `remedy`.  `flip` has `to`, the other
precision, and a `kind`:

- "exact": `extra` is the cost above the placement in force, without rewards (in the
  unit of the section); `more_allow_in_fp32`; the casts that would `appear` and
  `vanish`, each as [value, dtype]; and the other ops that would change `along`;
- "bound": `extra` and `more_allow_in_fp32` for a change of this op alone, so that the
  least cost is no higher (rewards included);
- "never": the op cannot have the other precision; `why` is the reason;
- "unknown": the op cannot change alone, and the exact cost was not affordable.

`root` is null, or has, for an op that type promotion leaves fp32,

- `node`: the index of the node at the root of the chain;
- `said`: a sentence on that node;
- `chain`: indices of the nodes from the root to the op.

`remedy` is null where no option was tried, or has

- `words`: the options, "" where no option makes the op low;
- `tried`: where no option makes the op low, the options that were tried;
- `extra`: the predicted cost above the cost of the present placement;
- `along`: the number of other nodes that would change;
- `risk`: the risk of the options, or "".

The costs of a box have the keys

- `fp32`, `placed`: the cost of its ops in fp32, and as placed with the casts before
  them;
- `keep`: the cost of all its ops in fp32; null where no op is low;
- `lower`: the cost of all its ops low, but for ops that must be fp32; null where no op
  would change.

`keep` and `lower` have `extra`, the cost above the cost of the present placement, the
number of `ops` that change, and `why`: the reason where the change is impossible
(`extra` is then null).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoamp.analyse.ceiling import promotes_to_low, root_of
from autoamp.analyse.verdict import CEILING
from autoamp.errors import PlacementError
from autoamp.inspect.changes import (
    Flips,
    FlipsAlone,
    candidates,
    cast_cost,
    contradiction,
    remedy_for,
)
from autoamp.inspect.page.drawing import Box
from autoamp.inspect.rows import Section
from autoamp.inspect.why import risk_of, root_text
from autoamp.saved.rows import FP32, OpRow

MOST_WORK = 100_000
"""The limit on the placements solved for one page, times the nodes of the graphs.

One node of one placement takes about 11 microseconds, so the limit is about a second;
the costs of modules take as much again.
"""

MOST_TRIES = 3_000
"""The limit on runs of the pass for one page, times the nodes of the graphs.

One run takes about a millisecond for each node, so the limit is about 3 seconds.
"""


def changes_of(
    section: Section, index: Mapping[str, int], solver: Flips, work: int
) -> dict[str, dict[str, Any]]:
    """What would change each op: its `flip`, `root` and `remedy`.

    Args:
        index: the place of each node on the page.
        work: the nodes of all graphs that the page shows, times their number.
    """
    flips = flips_of(section, solver, MOST_WORK // work)
    roots = _roots(section, index)
    remedies = remedies_of(section, MOST_TRIES // work)
    return {
        name: {"flip": f, "root": roots.get(name), "remedy": remedies.get(name)}
        for name, f in flips.items()
    }


def flips_of(section: Section, solver: Flips, most: int) -> dict[str, dict[str, Any]]:
    """Each op to the cost of its other precision; at most `most` costs are exact."""
    free = [row for row in section.ops if not row.pinned]
    first = sorted(free, key=lambda row: -row.bytes)[:most]
    exact = {row.name for row in first}
    alone = FlipsAlone(section.rewritten)
    found = {}
    for row in section.ops:
        if row.pinned:
            entry = {"kind": "never", "why": row.pinned}
        elif row.name in exact:
            entry = _exact(section, solver, row.name)
        else:
            entry = _bound(alone.of(row.name))
        found[row.name] = {"to": FP32 if row.is_low else section.low, **entry}
    return found


def _exact(section: Section, solver: Flips, name: str) -> dict[str, Any]:
    try:
        found = solver.of(name)
    except PlacementError as error:
        return {"kind": "never", "why": contradiction(error)}
    dtypes = {"up": FP32, "down": section.low}
    return {
        "kind": "exact",
        "extra": found.extra_estimate,
        "more_allow_in_fp32": found.extra_allow_in_fp32,
        "appear": [[value, dtypes[way]] for value, way in found.appear],
        "vanish": [[value, dtypes[way]] for value, way in found.vanish],
        "along": list(found.along),
    }


def _bound(alone: tuple[int, int] | None) -> dict[str, Any]:
    if alone is None:
        return {"kind": "unknown"}
    return {"kind": "bound", "extra": alone[0], "more_allow_in_fp32": alone[1]}


def _roots(section: Section, index: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    classified = section.rewritten.classified
    low = promotes_to_low(classified)
    found: dict[str, dict[str, Any]] = {}
    for row in section.ops:
        if row.is_low or classified.verdicts[row.name].origin != CEILING:
            continue
        root = root_of(row.name, classified, low)
        # A weight has no precision to be chosen, so the op that reads it is the root.
        is_value = root.source in classified.facts.constants
        first = root.reader if is_value else root.source
        chain = [first, *root.path, row.name]
        found[row.name] = {
            "node": index[first],
            "said": root_text(section, root),
            "chain": [index[name] for name in dict.fromkeys(chain)],
        }
    return found


def remedies_of(section: Section, most: int) -> dict[str, dict[str, Any]]:
    """Each op in fp32 to the option that would lower it, by at most `most` pass runs.

    The op of each kind that takes most time is tried first.  An option that also lowers
    other ops of the same kind is their remedy too.
    """
    rewritten = section.rewritten
    if rewritten.options is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    high = [row for row in section.ops if not row.is_low]
    high.sort(key=lambda row: -row.cost_fp32)
    firsts = {_kind(row): row for row in reversed(high)}
    for row in sorted(high, key=lambda row: firsts[_kind(row)] is not row):
        if row.name in found:
            continue
        tries = [*candidates(rewritten, row.name)]
        if len(tries) > most:
            continue
        most -= len(tries)
        remedy = remedy_for(rewritten, row.name)
        if remedy is None:
            tried = [" and ".join(words) for _, words in tries]
            found[row.name] = {"words": "", "tried": tried}
            continue
        along = set(remedy.along)
        alike = [r.name for r in high if r.name in along and _kind(r) == _kind(row)]
        for name in (row.name, *alike):
            entry = {
                "words": remedy.words,
                "extra": remedy.extra,
                "along": len(remedy.along),
                "risk": risk_of(rewritten.classified.verdicts[name]),
            }
            found.setdefault(name, entry)
    return found


def _kind(row: OpRow) -> tuple[str, str, str]:
    return row.op, row.category, row.origin


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
    found = []
    for box, rows in enumerate(members):
        entry: dict[str, Any] = {"fp32": fp32[box], "placed": placed[box]}
        free = [row for row in rows if not row.pinned]
        for key, low in (("keep", False), ("lower", True)):
            changed, entry[key] = sum(row.is_low != low for row in free), None
            if changed and most > 0:
                most -= 1
                names = [row.name for row in free]
                entry[key] = {"ops": changed, **_cost_of_all(solver, names, low=low)}
        found.append(entry)
    return found


def _casts(section: Section, box_of: Mapping[str, int]) -> list[tuple[int, int]]:
    """The box of the first op that reads each cast, and the cost of the cast."""
    assignment = section.rewritten.assignment
    found = []
    for group in assignment.problem.groups:
        cost = cast_cost(group, assignment.low.__contains__)
        if cost:
            is_low = group.value in assignment.low
            readers = [r for r in group.readers if (r in assignment.low) != is_low]
            homes = [box_of[n] for n in (*readers, group.value) if n in box_of]
            found.append((homes[0] if homes else 0, cost))
    return found


def _cost_of_all(solver: Flips, names: Sequence[str], *, low: bool) -> dict[str, Any]:
    try:
        change = solver.of_all(names, low=low)
    except PlacementError as error:
        return {"extra": None, "why": contradiction(error)}
    return {"extra": change.extra_estimate, "why": ""}
