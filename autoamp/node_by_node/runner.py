"""Runs a graph node by node, bodies included, and calls observers at each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from autoamp import compat
from autoamp.graph_functions import checkpointed
from autoamp.node_by_node.bodies import UNROLLED
from autoamp.node_by_node.observer import Observer
from autoamp.rewrite.meshes import crossed, stands_in


class Runner(fx.Interpreter):
    """One run of one graph, or of one body."""

    def __init__(
        self,
        gm: fx.GraphModule,
        observers: Sequence[Observer],
        *,
        keep_values: bool = False,
        is_body: bool = False,
    ) -> None:
        """Prepares a run.

        Args:
            observers: each observer gets the value that the observer before returned.
            keep_values: whether every value is kept to the end of the run.
            is_body: whether `gm` is a body, whose end is not the end of the run.
        """
        super().__init__(gm, garbage_collect_values=not keep_values)
        self.extra_traceback = False  # an error of the user's reads as without autoamp
        self.observers, self.is_body = observers, is_body
        self._unrolls = any(each.unrolls for each in observers)

    def run(self, *args: Any) -> Any:  # type: ignore[override]
        """Runs the graph on `args`."""
        results = None
        try:
            results = super().run(*args)
            return results
        finally:
            self.env.clear()  # an error may hold this object, which holds inputs
            if not self.is_body:
                for each in self.observers:
                    each.ended(results)

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node."""
        for each in self.observers:
            each.before(self, n)
        value = self._crossed(n) if stands_in(n) else super().run_node(n)
        for each in self.observers:
            value = each.after(self, n, value)
        return value

    def _crossed(self, n: fx.Node) -> Any:
        """The call on DTensors that a node stands for in a graph of whole tensors."""
        args, _ = self.fetch_args_kwargs_from_env(n)
        # An input that only such calls read has no reader, and so is still there.
        inputs = [self.env.get(i) for i in n.graph.find_nodes(op="placeholder")]
        return crossed(n, args[0], inputs)

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs one call; the body of a checkpointed region runs node by node too.

        Bodies of branches and loops run node by node if an observer `unrolls` them.
        """
        if target is checkpointed:
            args = (self._body(args[0]), *args[1:])
        elif target in UNROLLED and self._unrolls and not compat.inside_backward():
            return UNROLLED[target](self._body, self.observers, *args)
        return super().call_function(target, args, kwargs)

    def _body(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """The function that runs the body of a region, branch or loop."""

        def run(*args: Any) -> Any:
            observers = [each.of_body(self, gm) for each in self.observers]
            keeps = not self.garbage_collect_values
            return Runner(gm, observers, keep_values=keeps, is_body=True).run(*args)

        return run


def runs_every_op(gm: fx.GraphModule) -> bool:
    """Whether every op of `gm` runs as a node: ops of branches and loops do not."""
    bodies = [n for n in gm.graph.nodes if n.op == "get_attr" and _graph_at(gm, n)]
    return all(
        user.target is checkpointed and runs_every_op(_graph_at(gm, node))
        for node in bodies
        for user in node.users
    )


def _graph_at(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The graph that a node names, or None."""
    found: Any = gm
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found if isinstance(found, fx.GraphModule) else None
