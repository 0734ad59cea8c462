"""How much of a model's work ran in low precision, and how much ran unconverted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from autoamp import compat
from autoamp.inspect.text import not_captured
from autoamp.place.flops import flops_of
from autoamp.rewrite.rewritten import Rewritten


@dataclass(frozen=True)
class Coverage:
    """Counts over all calls so far.

    Attributes:
        calls: calls of the converted model.
        calls_aside: calls that ran no rewritten graph.
        calls_in_part: calls that ran rewritten graphs and also fp32 graphs, on which
            the pass failed.
        flops: flops of the matrix products, convolutions, attention and recurrent
            layers of the graphs, forward only, counted at each run of a graph.
        low_flops: the part of `flops` in low precision.
        parts_not_captured: functions and modules of which not all runs in graphs, and
            whose other flops nobody counts.
    """

    calls: int
    calls_aside: int
    calls_in_part: int
    flops: int
    low_flops: int
    parts_not_captured: int

    @property
    def share_of_calls(self) -> float:
        """The share of calls that ran rewritten graphs, 0 to 1; 1 before any call."""
        return 1 - self.calls_aside / self.calls if self.calls else 1.0

    @property
    def share_of_flops(self) -> float | None:
        """The share of flops in low precision, 0 to 1; None where `flops` is 0."""
        return self.low_flops / self.flops if self.flops else None

    def counts_and_shares(self) -> dict[str, float | None]:
        """Every attribute and share by its name."""
        shares = {n: getattr(self, n) for n in ("share_of_calls", "share_of_flops")}
        return {**asdict(self), **shares}


def coverage_of(
    calls: int,
    calls_aside: int,
    calls_in_part: int,
    graphs: Iterable[tuple[Rewritten, Mapping[tuple[int, ...], int]]],
    skipped: Iterable[tuple[str, str]],
) -> Coverage:
    """The counts of one model.

    Args:
        graphs: rewritten graphs, each with its number of runs by the values of its
            symbolic sizes, in the order of its inputs.
        skipped: the parts that were not converted, with the reasons.
    """
    flops = low_flops = 0
    for rewritten, ran in graphs:
        names = compat.size_symbols(rewritten.before)
        for sizes, runs in ran.items():
            total, low = _flops(rewritten, dict(zip(names, sizes, strict=False)))
            flops, low_flops = flops + runs * total, low_flops + runs * low
    left = len(not_captured(skipped))
    return Coverage(calls, calls_aside, calls_in_part, flops, low_flops, left)


def _flops(rewritten: Rewritten, values: Mapping[Any, int]) -> tuple[int, int]:
    total = low = 0
    nodes = {n.name: n for n in rewritten.before.graph.nodes}
    size = partial(compat.size_with, values=values)
    for name, decision in rewritten.assignment.decisions.items():
        count = flops_of(nodes[name], rewritten.facts.nodes[name], size)
        total += count
        low += count if decision.low else 0
    for body in rewritten.bodies:
        inner = _flops(body, values)
        total, low = total + inner[0], low + inner[1]
    return total, low
