"""The cost of the other precision for every op of a section, exact or as a bound.

For an exact cost the placement is solved again: for all ops of a graph of 3 000 nodes
that would take minutes.  So the ops that move most bytes get the exact cost; every
other op gets an upper bound, the cost of changing that op alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.errors import PlacementError
from autoamp.inspect.flip import Flips, contradiction
from autoamp.inspect.rows import Section
from autoamp.place.two_sides import Group, Problem
from autoamp.rules import Category

MOST_WORK = 100_000
"""The limit on the placements solved for one page, times the nodes of the graphs.

One node of one placement takes about 11 microseconds, so the limit is about a second;
the costs of modules take as much again.
"""


def flips_of(section: Section, solver: Flips, most: int) -> dict[str, dict[str, Any]]:
    """Each op to the cost of its other precision; at most `most` costs are exact.

    The `kind` of an entry is one of

    - "exact": `extra` is the cost above the placement in force, without rewards (in
      the unit of the section); `more_allow_in_fp32`; the casts that would `appear` and
      `vanish`, each as [value, dtype]; and the other ops that would change `along`;
    - "bound": `extra` and `more_allow_in_fp32` for a change of this op alone, so that
      the least cost is no higher (rewards included);
    - "never": the op cannot have the other precision; `why` is the reason;
    - "unknown": the op cannot change alone, and the exact cost was not affordable.
    """
    pinned = section.rewritten.assignment.pinned
    free = [row for row in section.ops if row.name not in pinned]
    first = sorted(free, key=lambda row: -row.bytes)[:most]
    chosen = {row.name for row in first}
    bounds = _Bounds(section)
    return {
        row.name: {"to": short_name(HIGH_DTYPE) if row.is_low else section.low}
        | (
            {"kind": "never", "why": pinned[row.name]}
            if row.name in pinned
            else _exact(section, solver, row.name)
            if row.name in chosen
            else bounds.of(row.name)
        )
        for row in section.ops
    }


def _exact(section: Section, solver: Flips, name: str) -> dict[str, Any]:
    try:
        found = solver.of(name)
    except PlacementError as error:
        return {"kind": "never", "why": contradiction(error)}
    dtypes = {"up": short_name(HIGH_DTYPE), "down": section.low}
    return {
        "kind": "exact",
        "extra": found.extra_estimate,
        "more_allow_in_fp32": found.extra_allow_in_fp32,
        "appear": [[value, dtypes[way]] for value, way in found.appear],
        "vanish": [[value, dtypes[way]] for value, way in found.vanish],
        "along": list(found.along),
    }


class _Bounds:
    """Computes the cost of changing one op alone, from the terms that name the op."""

    def __init__(self, section: Section) -> None:
        assignment = section.rewritten.assignment
        self._problem = assignment.problem
        self._low = assignment.low
        self._reward = assignment.prices.reward
        self._verdicts = section.rewritten.classified.verdicts
        self._groups = _groups_by_variable(self._problem)
        self._tied = {v for a, b, _ in self._problem.ties if a != b for v in (a, b)}
        self._follows: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for reader, value, _ in self._problem.follows:
            self._follows[reader].append((reader, value))
            self._follows[value].append((reader, value))

    def of(self, name: str) -> dict[str, Any]:
        """The entry of one op."""
        flipped = _Flipped(self._low, name)
        legal = name not in self._tied and not any(
            flipped.has(reader) and not flipped.has(value)
            for reader, value in self._follows[name]
        )
        before = [cast_cost(g, self._low.__contains__) for g in self._groups[name]]
        after = [cast_cost(g, flipped.has) for g in self._groups[name]]
        if not legal or None in after:
            return {"kind": "unknown"}
        prices = self._problem.unary[name]
        extra = prices[flipped.has(name)] - prices[name in self._low]
        extra += sum(c or 0 for c in after) - sum(c or 0 for c in before)
        more = 0
        if self._verdicts[name].category is Category.ALLOW:
            more = 1 if name in self._low else -1
        return {
            "kind": "bound",
            "extra": extra - self._reward * more,
            "more_allow_in_fp32": more,
        }


class _Flipped:
    """The labelling `low` with one variable changed, without a copy of it."""

    def __init__(self, low: frozenset[str], name: str) -> None:
        self._low, self._name = low, name

    def has(self, variable: str) -> bool:
        """Whether `variable` is low."""
        return (variable in self._low) != (variable == self._name)


def _groups_by_variable(problem: Problem) -> Mapping[str, list[Group]]:
    found: dict[str, list[Group]] = defaultdict(list)
    for group in problem.groups:
        for variable in dict.fromkeys(_variables(group)):
            found[variable].append(group)
    return found


def _variables(group: Group) -> Iterator[str]:
    yield group.value
    yield from group.readers


def cast_cost(group: Group, is_low: Callable[[str], bool]) -> int | None:
    """The cost of the cast that a labelling needs in a group; None if forbidden.

    The source side of the problem is low (`place/problem.py`).
    """
    if is_low(group.value):
        return group.to_sink if any(not is_low(r) for r in group.readers) else 0
    return group.to_source if any(is_low(r) for r in group.readers) else 0
