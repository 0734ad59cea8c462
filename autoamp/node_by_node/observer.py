"""What may be given to a run node by node: an observer of its nodes and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx


class Observer:
    """Observes one run of one graph, or of one body; by default nothing is done.

    Attributes:
        unrolls: whether the bodies of branches and loops are to run node by node too.
    """

    unrolls = False

    def before(self, run: fx.Interpreter, n: fx.Node) -> None:
        """A node is about to run."""

    def after(self, run: fx.Interpreter, n: fx.Node, value: Any) -> Any:  # noqa: ARG002
        """A node has run; the result is taken for its value."""
        return value

    def of_body(self, run: fx.Interpreter, gm: fx.GraphModule) -> Observer:  # noqa: ARG002
        """The observer of one run of the body `gm` in `run`."""
        return self

    def cut(self, part: Any, whole: Any) -> None:
        """A loop has cut `part` out of `whole`."""

    def joined(self, whole: Any, parts: Sequence[Any]) -> None:
        """A loop has stacked `parts` to `whole`."""

    def ended(self, results: Any) -> None:
        """The graph has run; results are None where it raised."""
