"""Problems of two sides with shared copies, on plain names and integers.

Every variable stands on the source side or on the sink side; the caller decides what
the sides mean (`place/problem.py`: low and fp32).  The total to minimise is

    sum of unary costs
  + for each group, `to_source` once if its value is on the sink side and any reader is
    on the source side
  + for each group, `to_sink` once in the opposite case
  + for each crossing, `to_source` or `to_sink` in the same two cases

A copy is shared: one serves all readers of its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Group:
    """Readers of one value that could share a copy of it.

    Attributes:
        key: the name of the value that is copied, and two numbers that tell the groups
            of one value apart.
        value: the variable that decides the value's side.
        readers: variables that read the value on their own side.
        to_source: cost of one copy to the source side; None forbids it.
        to_sink: cost of one copy to the sink side; None forbids it.
        why: the reason why a copy is forbidden.
    """

    key: tuple[str, int, int]
    value: str
    readers: tuple[str, ...]
    to_source: int | None
    to_sink: int | None
    why: str = "the value must not be copied"


@dataclass(frozen=True)
class Crossing:
    """A cost of one reader standing on another side than the value that it reads.

    Attributes:
        value, reader: two variables.
        to_source: the cost if the reader alone stands on the source side.
        to_sink: the cost if the value alone stands on the source side.
    """

    value: str
    reader: str
    to_source: int
    to_sink: int


@dataclass(frozen=True)
class Problem:
    """A problem of two sides; costs are non-negative integers of any one unit.

    Attributes:
        unary: variable to its cost on the sink side and its cost on the source side.
        at_sink, at_source: variable to the reason why it must stand on that side.
        groups: the possible copies.
        crossings: costs of pairs, beside those of copies.
        ties: pairs of variables that must stand on one side, with the reason.
        follows: (reader, value, reason): the reader may stand on the source side only
            if the value does.
    """

    unary: Mapping[str, tuple[int, int]]
    at_sink: Mapping[str, str] = field(default_factory=dict)
    at_source: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    crossings: Sequence[Crossing] = ()
    ties: Sequence[tuple[str, str, str]] = ()
    follows: Sequence[tuple[str, str, str]] = ()


@dataclass(frozen=True)
class Solution:
    """The variables on the source side, and the least total cost, which is exact."""

    source: frozenset[str]
    cost: int


def energy(problem: Problem, source: frozenset[str]) -> int | None:
    """The cost of having the variables `source` on the source side.

    The result is None where a constraint is broken.
    """
    if source & problem.at_sink.keys() or problem.at_source.keys() - source:
        return None
    if any((a in source) != (b in source) for a, b, _ in problem.ties):
        return None
    if any(a in source and b not in source for a, b, _ in problem.follows):
        return None
    total = sum(costs[v in source] for v, costs in problem.unary.items())
    for group in problem.groups:
        if group.value in source:
            cost, needed = group.to_sink, any(r not in source for r in group.readers)
        else:
            cost, needed = group.to_source, any(r in source for r in group.readers)
        if needed:
            if cost is None:
                return None
            total += cost
    for crossing in problem.crossings:
        sides = crossing.value in source, crossing.reader in source
        if sides == (False, True):
            total += crossing.to_source
        elif sides == (True, False):
            total += crossing.to_sink
    return total
