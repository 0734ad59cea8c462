"""Runs a graph node by node, in fp32 or as rewritten, and reports every value.

The rewrite keeps the names of nodes, so the values of both runs have the same keys.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg

from autoamp.ask.replan import before_rewrite
from autoamp.node_by_node.held import Held
from autoamp.node_by_node.observer import Observer
from autoamp.node_by_node.runner import Runner
from autoamp.pipeline.prepared import Prepared
from autoamp.rewrite.emitted import stands_for
from autoamp.rewrite.meshes import crossed, stands_in
from autoamp.rewrite.rewritten import Rewritten

Hear = Callable[["Key", fx.Node, torch.Tensor, Callable[..., Any]], None]
"""Called with a key, a float op, its result, and a function.  The function gives the
op's result on the operands of the fp32 run, rounded to the dtypes that the op reads."""


class Key(NamedTuple):
    """One node in one run of one graph.

    Attributes:
        graph: number of the captured graph.
        body: "" or the path of the body inside the graph.
        name: the node's name.
        run: how many times the graph, or the body, had run before.
    """

    graph: int
    body: str
    name: str
    run: int


@dataclass
class Score:
    """How the graphs of one call are run.

    Attributes:
        is_low: whether the rewritten graphs run; if not, the graphs before the rewrite.
        hear: called for each op's result.
        numbers: the number of each graph; a graph that first runs in this call, on a
            branch that no call took before, gets the next number.
        record: gives the record of a graph that is run.
    """

    is_low: bool
    hear: Hear
    numbers: dict[Prepared, int]
    record: Callable[[Prepared], Rewritten]
    _as_captured: dict[Prepared, fx.GraphModule] = field(default_factory=dict)
    _runs: Counter[tuple[int, str]] = field(default_factory=Counter)

    def play(self, prepared: Prepared, args: tuple[Any, ...]) -> Any:
        """Runs one graph on the arguments of a call."""
        number = self.numbers.setdefault(prepared, len(self.numbers))
        record = self.record(prepared)
        gm = record.gm if self.is_low else self._before(prepared, record)
        observers = [Held(), self.listener(record, number, "")]
        # Values are kept, because `rounded` reads values from before the casts.
        return Runner(gm, observers, keep_values=True).run(*args)

    def _before(self, prepared: Prepared, record: Rewritten) -> fx.GraphModule:
        if prepared not in self._as_captured:
            self._as_captured[prepared] = before_rewrite(record)
        return self._as_captured[prepared]

    def listener(self, rewritten: Rewritten, graph: int, body: str) -> Listener:
        """The listener to one more run of a graph or body."""
        run = self._runs[graph, body]
        self._runs[graph, body] += 1
        return Listener(self, rewritten, graph, body, run)


@dataclass
class Listener(Observer):
    """Passes each result of one run of a graph or body to `Score.hear`."""

    score: Score
    rewritten: Rewritten
    graph: int
    body: str
    number: int

    def after(self, run: fx.Interpreter, n: fx.Node, value: Any) -> Any:
        """The value, which is reported if the node is a float op of the model."""
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_float and n.name in self.rewritten.assignment.decisions:
            rounded = functools.partial(self._rounded, run, n)
            self.score.hear(self._key(n), n, value, rounded)
        return value

    def of_body(self, run: fx.Interpreter, gm: fx.GraphModule) -> Listener:
        """The listener to one run of a checkpointed region's body."""
        children = run.module.named_children()
        name = next(name for name, child in children if child is gm)
        body = getattr(self.rewritten.before, name)
        record = next(each for each in self.rewritten.bodies if each.gm is body)
        path = f"{self.body}/{name}" if self.body else name
        return self.score.listener(record, self.graph, path)

    def _key(self, n: fx.Node) -> Key:
        return Key(self.graph, self.body, n.name, self.number)

    def _rounded(
        self, run: fx.Interpreter, node: fx.Node, exact: Mapping[Key, torch.Tensor]
    ) -> Any:
        """The result of a low node on the operands of the fp32 run, rounded.

        Args:
            exact: the values of the fp32 run.
        """

        def operand(at: fx.Node) -> Any:
            source = stands_for(at)
            value = exact.get(self._key(source), run.env[source])
            known = at.meta.get("val")
            if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor):
                return value.detach().to(known.dtype, copy=True)
            return value

        args, kwargs = map_arg(node.args, operand), map_arg(node.kwargs, operand)
        target: Any = node.target
        with torch.no_grad():
            if stands_in(node):
                inputs = node.graph.find_nodes(op="placeholder")
                return crossed(node, args[0], [run.env[each] for each in inputs])
            return target(*args, **kwargs)
