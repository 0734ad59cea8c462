"""One captured graph, rewritten once, and run by each model with its own copies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import fx

from autoamp.pipeline.prepared import Prepared
from autoamp.rewrite.edge.scale_edge import Edge
from autoamp.rewrite.rewritten import Rewritten
from autoamp.weights.copies import WeightCopies


@dataclass(eq=False)
class CapturedGraph:
    """A graph as one model runs it.

    Attributes:
        prepared: the graph, which other models may run as well.
        copies: the weight copies the graph is given, or None where it needs none.
        runs: how often the graph ran.
        sizes: how often the graph ran with which values of its symbolic sizes; empty
            where it has none.
    """

    prepared: Prepared
    copies: WeightCopies | None = None
    runs: int = 0
    sizes: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @property
    def rewritten(self) -> Rewritten | None:
        """The pass's result, or None where it failed."""
        return self.prepared.rewritten

    @property
    def gm(self) -> fx.GraphModule:
        """The graph that is run, with weight copies as extra inputs."""
        return self.prepared.gm

    @property
    def problem(self) -> str:
        """Why the graph runs unconverted; "" where it is converted."""
        return self.prepared.problem

    @property
    def edge(self) -> Edge:
        """The inputs that loss scaling adds to the graph."""
        return self.prepared.edge

    @property
    def in_own_autocast(self) -> bool:
        """Whether some of the graph runs under a `torch.autocast` of the script's."""
        if self.rewritten is None or self.prepared.own_autocast:
            return self.prepared.own_autocast
        every = [each.facts.nodes for each in self.rewritten.with_bodies()]
        return any(node.autocast for nodes in every for node in nodes.values())
