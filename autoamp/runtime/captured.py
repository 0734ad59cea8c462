"""The record of a conversion: its graphs, its calls, and what was not converted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import fx

from autoamp.pipeline import Rewritten
from autoamp.runtime.boundary import Boundary
from autoamp.runtime.weights import WeightCopies


@dataclass
class CapturedGraph:
    """One graph Dynamo captured, and what became of it.

    Attributes:
        rewritten: the pass's result, or None where it failed.
        gm: the graph that is run, with weight copies as extra inputs.
        problem: why the graph runs unconverted; "" where it does not.
        runs: how often it ran.
        copies: the weight copies it is given, or None where it needs none.
        boundary: what loss scaling adds to its inputs.
        sizes: how often it ran with which values of its symbolic sizes; empty where it
            has none.
    """

    rewritten: Rewritten | None
    gm: fx.GraphModule
    problem: str = ""
    runs: int = 0
    copies: WeightCopies | None = None
    boundary: Boundary = field(default_factory=Boundary)
    sizes: Counter[tuple[int, ...]] = field(default_factory=Counter)


@dataclass
class Tally:
    """Of one model, whoever compiles its graphs.

    Attributes:
        calls, aside: calls so far, and those that ran no rewritten graph.
        in_part: calls that ran rewritten graphs and graphs the pass failed on.
        lowers: some op of some graph is low.
        announced: its one line of log has been written.
    """

    calls: int = 0
    aside: int = 0
    in_part: int = 0
    lowers: bool = False
    announced: bool = False


@dataclass
class Skipped:
    """Something that was not converted, and why."""

    what: str
    why: str
