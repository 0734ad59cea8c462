"""Counts what Dynamo captures of one callable, against the work of one call."""

from __future__ import annotations

from collections.abc import Hashable

_MOST_SMALL_GRAPHS = 64
"""How many graphs there may be where a graph holds few nodes."""

_FEW_NODES = 16
"""A graph of fewer nodes has little for a rewrite to decide."""

_MOST_TIMES = 6
"""How many times over the same work may be captured: in training, in eval mode, ..."""

_FREE_NODES = 1000
"""Nodes that are captured again without a limit, because they take seconds."""


class Amount:
    """How much has been captured.

    Code that cannot be captured well breaks off at each hook, or needs new graphs at
    each call; without a limit its first calls would take minutes.
    """

    def __init__(self) -> None:
        self._graphs = self._nodes = 0
        self._work: dict[Hashable, int] = {}

    def note(self, part: Hashable, nodes: int) -> None:
        """Notes a graph of `nodes` nodes.

        Args:
            part: the code and the module that the graph is of.
        """
        self._graphs += 1
        self._nodes += nodes
        self._work[part] = max(self._work.get(part, 0), nodes)

    @property
    def too_much(self) -> str:
        """Why no more is to be captured; "" while more may be."""
        graphs, nodes, work = self._graphs, self._nodes, sum(self._work.values())
        if graphs > _MOST_SMALL_GRAPHS and nodes < _FEW_NODES * graphs:
            return (
                f"Dynamo made {graphs} graphs of it, of {nodes // graphs} nodes on "
                "average: graphs break at hooks, .item() and print "
                "(TORCH_LOGS=graph_breaks tells where)"
            )
        if nodes > _MOST_TIMES * work + _FREE_NODES:
            return (
                f"Dynamo captured {nodes} nodes, for a call that has {work}: each call "
                "needs graphs of its own (TORCH_LOGS=recompiles tells why)"
            )
        return ""
