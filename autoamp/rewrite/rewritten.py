"""One rewritten graph, with everything that the passes found out and decided."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.classified import Classified
from autoamp.analyse.facts import Facts
from autoamp.analyse.nodes import tensors_of
from autoamp.pass_options import PassOptions
from autoamp.place.assign import Assignment
from autoamp.rewrite.emitted import Cast


class Sums(NamedTuple):
    """Counts of a rewritten graph: low float ops, all float ops, and casts."""

    low: int
    ops: int
    casts: int


@dataclass(frozen=True)
class Rewritten:
    """One rewritten graph, and everything that the passes found out and decided.

    Attributes:
        gm: the rewritten graph.
        before: the ATen graph it was made from.
        classified, assignment: the facts with the verdicts, and the placement.
        casts: the casts inserted, in graph order.
        low: the compute dtype.
        seconds: time taken by each pass.
        given_up: nodes that a failed check keeps in fp32, each to the reason.
        bodies: the records of sub-graphs (checkpointed regions, branches, loops).
        options: the options that it was made under.
        fake_mode: the mode of the fake tensors of the pass; a graph may hold values of
            another mode beside, of attributes that Dynamo had met in an earlier trace.
        again: the passes that decide and write, run again on the same graph: takes
            options, and the nodes to keep fp32, each to the reason.
    """

    gm: fx.GraphModule
    before: fx.GraphModule
    classified: Classified
    assignment: Assignment
    casts: tuple[Cast, ...]
    low: torch.dtype
    seconds: dict[str, float]
    given_up: Mapping[str, str] = field(default_factory=dict)
    bodies: tuple[Rewritten, ...] = ()
    options: PassOptions | None = None
    fake_mode: Any = None
    again: Callable[[PassOptions, Mapping[str, str]], Rewritten] | None = None

    @property
    def facts(self) -> Facts:
        """The facts of `before`."""
        return self.classified.facts

    @functools.cached_property  # thirty models that share a graph each ask
    def sums(self) -> Sums:
        """The counts of this graph and its bodies together."""
        every = [*self.with_bodies()]
        decisions = [d for each in every for d in each.assignment.decisions.values()]
        low = sum(decision.low for decision in decisions)
        return Sums(low, len(decisions), sum(len(each.casts) for each in every))

    @property
    def written(self) -> list[int]:
        """The positions of the inputs that the graph, or a body of it, writes to."""
        memories = set().union(*(each.facts.mutated for each in self.with_bodies()))
        return [
            at
            for at, node in enumerate(self.before.graph.find_nodes(op="placeholder"))
            for tensor in tensors_of(node.meta.get("val"))
            if compat.storage_id(tensor) in memories
        ]

    def with_bodies(self) -> Iterator[Rewritten]:
        """Yields this record, then the records of all bodies, nested ones included."""
        yield self
        for body in self.bodies:
            yield from body.with_bodies()
