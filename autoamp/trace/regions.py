"""The autocast regions of a model's own, followed node by node through its graph.

A model may hold `with torch.autocast(...)` itself.  The model's graph then has nodes
that enter and leave the region; the nodes between run as in the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import fx

from autoamp import compat

CALLED_IN = "autoamp_called_in"
"""Set in the `meta` of a sub-graph: the regions it is called in, outermost first."""

Region = tuple[Any, ...]
"""The arguments of `torch.autocast`: device type, dtype, enabled, cache."""


class Regions:
    """The regions round the current node of a walk through a graph, in order.

    Example:
        >>> graph_module = fx.symbolic_trace(torch.nn.ReLU())
        >>> regions = Regions(graph_module)
        >>> for node in graph_module.graph.nodes:
        ...     regions.follow(node)
        ...     print(node, regions.is_on)
        input_1 None
        relu None
        output None
    """

    def __init__(self, gm: fx.GraphModule, outer: Sequence[Region] = ()) -> None:
        """Begins at the first node of `gm`, which is called in regions `outer`."""
        begun = gm.meta.get(CALLED_IN, outer)
        self._inside: list[tuple[fx.Node | None, Region]] = [(None, r) for r in begun]
        self._states: dict[Region, compat.AutocastState] = {}

    def follow(self, node: fx.Node) -> None:
        """Moves the walk on to `node`."""
        if node.target is compat.ENTER_AUTOCAST:
            self._inside.append((node, tuple(node.args)))
        elif node.target is compat.EXIT_AUTOCAST:
            self._inside = [each for each in self._inside if each[0] != node.args[0]]

    @property
    def inside(self) -> tuple[Region, ...]:
        """The regions round the current node, outermost first."""
        return tuple([region for _, region in self._inside])

    @property
    def is_on(self) -> bool | None:
        """Whether autocast is on in the innermost region; None outside all regions."""
        if not self._inside:
            return None
        region = self._inside[-1][1]
        return bool(region[2]) if len(region) > 2 else True

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Enters the same regions, for ops that are called to see their results."""
        if not self._inside:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for region in self.inside:
            if region not in self._states:
                self._states[region] = compat.autocast_state(*region[:3])
            stack.enter_context(compat.in_autocast(self._states[region]))
        return stack
