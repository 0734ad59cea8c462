"""The base class of observers, which see each node and value of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx


class Observer:
    """Observes one run of one graph, or of one body; each method here does nothing.

    Attributes:
        unrolls: whether the bodies of branches and loops are to run node by node too.
    """

    unrolls = False

    def before(self, run: fx.Interpreter, n: fx.Node) -> None:
        """Called before a node runs."""

    def after(self, run: fx.Interpreter, n: fx.Node, value: Any) -> Any:  # noqa: ARG002
        """Called after a node has run; the result replaces the node's value."""
        return value

    def of_body(self, run: fx.Interpreter, gm: fx.GraphModule) -> Observer:  # noqa: ARG002
        """The observer of one run of the body `gm` in `run`."""
        return self

    def cut(self, part: Any, whole: Any) -> None:
        """Called when a loop has cut `part` out of `whole`."""

    def joined(self, whole: Any, parts: Sequence[Any]) -> None:
        """Called when a loop has stacked `parts` to `whole`."""

    def ended(self, results: Any) -> None:
        """Called at the end of a run; `results` is None where the run raised."""
