"""Runs a graph node by node, in fp32 or as rewritten, and hears every value of it.

The rewrite keeps the names of nodes, so that the values of both runs are found by the
same key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg

from autoamp.graph_functions import checkpointed
from autoamp.node_by_node.promised import Promised
from autoamp.pipeline.prepared import Prepared
from autoamp.rewrite.emitted import stands_for
from autoamp.rewrite.rewritten import Rewritten


class Key(NamedTuple):
    """One node in one run of one graph.

    Attributes:
        graph: number of the captured graph.
        body: "" or the path of the body inside the graph.
        name: the node's name.
        run: how often the graph, or the body, had run before.
    """

    graph: int
    body: str
    name: str
    run: int


Hear = Callable[[Key, fx.Node, torch.Tensor, "Player"], None]
"""Is called with each float tensor that a float op makes, and the player of the op."""


@dataclass
class Score:
    """How the graphs of one call are run.

    Attributes:
        is_low: whether the rewritten graphs run, or the graphs before the rewrite.
        hear: called for each op's result.
        numbers: the number of each graph; a graph met first in this run, on a branch
            that no run took before, gets the next number.
        place: gives the record that is run for a graph's record of the pass.
    """

    is_low: bool
    hear: Hear
    numbers: dict[Prepared, int]
    place: Callable[[Rewritten], Rewritten]
    _placed: dict[int, Rewritten] = field(default_factory=dict)
    _runs: Counter[tuple[int, str]] = field(default_factory=Counter)

    def play(self, prepared: Prepared, args: tuple[Any, ...]) -> Any:
        """Runs one graph on the arguments of a call."""
        number = self.numbers.setdefault(prepared, len(self.numbers))
        if number not in self._placed:
            assert prepared.rewritten is not None, "graphs as they were are not played"
            self._placed[number] = self.place(prepared.rewritten)
        return self.player(self._placed[number], number, "").run(*args)

    def player(self, rewritten: Rewritten, graph: int, body: str) -> Player:
        """The player of one more run of a graph or body."""
        run = self._runs[graph, body]
        self._runs[graph, body] += 1
        return Player(self, rewritten, graph, body, run)


class Player(Promised):
    """One run of one graph, or of one body."""

    def __init__(
        self, score: Score, rewritten: Rewritten, graph: int, body: str, run: int
    ) -> None:
        gm = rewritten.gm if score.is_low else rewritten.before
        # Values are kept, because `rounded` reads values from before the casts.
        super().__init__(gm, keep_values=True)
        self.score = score
        self.rewritten = rewritten
        self.place = graph, body
        self.run_number = run
        children = rewritten.before.named_children()
        records = {id(each.gm): each for each in rewritten.bodies}
        self.bodies = {
            name: records[id(child)] for name, child in children if id(child) in records
        }

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node, and lets its result be heard."""
        value = super().run_node(n)
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_float and n.name in self.rewritten.assignment.decisions:
            key = Key(*self.place, n.name, self.run_number)
            self.score.hear(key, n, value, self)
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An attribute; the body of a loop or branch is the one this run asks for."""
        record = self.bodies.get(target)
        if record is None:
            return super().get_attr(target, args, kwargs)
        return record.gm if self.score.is_low else record.before

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs one call; a checkpointed region's body runs node by node as well."""
        if target is checkpointed:
            graph, body = self.place
            for name, record in self.bodies.items():
                if args[0] in (record.gm, record.before):
                    path = f"{body}/{name}" if body else name
                    return self.score.player(record, graph, path).run(*args[1:])
        return super().call_function(target, args, kwargs)

    def rounded(self, node: fx.Node, exact: Mapping[Key, torch.Tensor]) -> Any:
        """The result of a low node on exact operands, which are rounded for it.

        Args:
            exact: the values of the fp32 run.
        """

        def operand(at: fx.Node) -> Any:
            source = stands_for(at)
            key = Key(*self.place, source.name, self.run_number)
            value, known = exact.get(key, self.env[source]), at.meta.get("val")
            if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor):
                return value.detach().to(known.dtype, copy=True)
            return value

        args, kwargs = map_arg(node.args, operand), map_arg(node.kwargs, operand)
        target: Any = node.target
        with torch.no_grad():
            return target(*args, **kwargs)
