"""The predicted cost of each module, and of all its ops in one precision.

The costs of a module, in the unit of its section, have the keys

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

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from autoamp.errors import PlacementError
from autoamp.inspect.costs import in_fp32
from autoamp.inspect.flip import Flips, contradiction
from autoamp.inspect.nodes.homes import Group
from autoamp.inspect.page.flips import cast_cost
from autoamp.inspect.rows import Section
from autoamp.inspect.sections.prediction import as_placed


def modules_of(
    section: Section,
    groups: Sequence[Group],
    group_of: Mapping[str, int],
    solver: Flips,
    most: int,
) -> list[dict[str, Any]]:
    """The costs of each box; at most `most` placements are solved, outermost first."""
    rewritten = section.rewritten
    ops = list(rewritten.assignment.decisions)
    own = [[0, 0] for _ in groups]
    members: dict[int, list[str]] = defaultdict(list)
    for name in ops:
        own[group_of[name]][0] += in_fp32(rewritten, name)
        own[group_of[name]][1] += as_placed(rewritten, name)
        members[group_of[name]].append(name)
    for place, cost in _casts(section, group_of):
        own[place][1] += cost
    for place in reversed(range(1, len(groups))):  # children come after their parents
        parent = groups[place].parent
        members[parent] += members[place]
        for side, cost in enumerate(own[place]):
            own[parent][side] += cost
    found = []
    for place, (fp32, placed) in enumerate(own):
        held = [_held(section, members[place], low=low) for low in (False, True)]
        entry: dict[str, Any] = {"fp32": fp32, "placed": placed}
        for key, names, low in zip(("keep", "lower"), held, (False, True), strict=True):
            entry[key] = None
            if names and most > 0:
                most -= 1
                entry[key] = _changed(section, solver, members[place], names, low=low)
        found.append(entry)
    return found


def _casts(section: Section, group_of: Mapping[str, int]) -> list[tuple[int, int]]:
    """The box of the first op that reads each cast, and the cost of the cast."""
    assignment = section.rewritten.assignment
    found = []
    for group in assignment.problem.groups:
        cost = cast_cost(group, assignment.low.__contains__)
        if cost:
            is_low = group.value in assignment.low
            readers = [r for r in group.readers if (r in assignment.low) != is_low]
            homes = [group_of[n] for n in (*readers, group.value) if n in group_of]
            found.append((homes[0] if homes else 0, cost))
    return found


def _held(section: Section, names: Sequence[str], *, low: bool) -> list[str]:
    """The ops that would have to change, without the ops that cannot change."""
    assignment = section.rewritten.assignment
    return [
        name
        for name in names
        if (name in assignment.low) != low and name not in assignment.pinned
    ]


def _changed(
    section: Section,
    solver: Flips,
    members: Sequence[str],
    names: Sequence[str],
    *,
    low: bool,
) -> dict[str, Any]:
    pinned = section.rewritten.assignment.pinned
    try:
        free = [name for name in members if name not in pinned]
        change = solver.of_all(free, low=low)
    except PlacementError as error:
        return {"ops": len(names), "extra": None, "why": contradiction(error)}
    return {"ops": len(names), "extra": change.extra_estimate, "why": ""}
