"""Placements that keep few bytes for the backward.

By default a placement keeps no more than that of autocast, and is the fastest of those
that do; but it is never slower than all fp32, whatever it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoamp.passes.decide.kept_values import kept_bytes
from autoamp.passes.decide.mincut import Problem, Share, energy
from autoamp.passes.decide.problem import least_cost

CUTS = 8
"""How many problems `within` solves at most; a cut of 8,800 ops takes 0.2 s."""


def weighed(
    problem: Problem, kept: Sequence[Share], byte: int, unit: int = 1
) -> Problem:
    """`problem` with the price `byte` on each byte kept, and all else times `unit`."""
    return replace(
        problem,
        unary={name: (a * unit, b * unit) for name, (a, b) in problem.unary.items()},
        groups=[
            replace(
                group,
                to_source=None if group.to_source is None else group.to_source * unit,
                to_sink=None if group.to_sink is None else group.to_sink * unit,
                made=None if group.made is None else group.made * unit,
            )
            for group in problem.groups
        ],
        shares=[
            replace(each, at_source=each.at_source * byte, at_sink=each.at_sink * byte)
            for each in kept
        ],
    )


def within(  # noqa: PLR0917
    problem: Problem,
    kept: Sequence[Share],
    fastest: frozenset[str],
    limit: int,
    slowest: int,
    byte: int,
) -> Problem:
    """`problem` with the least price on bytes at which few enough are kept.

    Its placement costs at most `slowest`; where no price brings the bytes to `limit`
    within that cost, it is a price that brings them down on the way there.

    Args:
        fastest: what is low in the placement of least cost.
        byte: the price of a byte that outweighs all else.
    """

    def point(low: frozenset[str]) -> tuple[int, int]:
        cost = energy(problem, low)
        assert cost is not None
        return cost, kept_bytes(kept, low)

    fast, now = problem, point(fastest)
    if now[1] <= limit:
        return fast
    lean = weighed(problem, kept, byte)
    least = point(least_cost(lean)[0])
    for _ in range(CUTS):
        # At this price the two cost the same, and a placement between them costs less.
        unit, price = now[1] - least[1], least[0] - now[0]
        if unit <= 0:
            break
        between = weighed(problem, kept, price, unit)
        new = point(least_cost(between)[0])
        if new in (now, least):
            break
        if new[1] <= limit or new[0] > slowest:
            lean, least = between, new
        else:
            fast, now = between, new
    return lean if least[0] <= slowest else fast
