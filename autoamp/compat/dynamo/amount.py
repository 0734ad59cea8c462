"""Counts what Dynamo captures of one model, against the work of one call."""

from __future__ import annotations

from collections.abc import Hashable

_MOST_SMALL_GRAPHS = 64
"""How many graphs there may be where a graph holds few nodes."""

_FEW_NODES = 16
"""A graph of fewer nodes has little for a rewrite to decide."""

_MOST_FRAMES = 64
"""How many functions Dynamo may trace where most give no graph."""

_FEW_IN_FRAMES = 2
"""Fewer nodes than this for each traced function are not worth a trace."""

_MOST_TIMES = 6
"""How many times over the same work may be captured: in training, in eval mode, ..."""

_FREE_NODES = 1000
"""Nodes that are captured again without a limit, because they take seconds."""


class Amount:
    """How much has been captured.

    Code that cannot be captured well breaks off at each hook, needs new graphs at each
    call, or is mostly Python; without a limit its first calls would take minutes.

    Attributes:
        graphs: how many graphs there are.
    """

    def __init__(self) -> None:
        self.graphs = self._frames = self._nodes = 0
        self._work: dict[Hashable, int] = {}

    def note(self, part: Hashable, nodes: int) -> None:
        """Notes a function that Dynamo has traced.

        Args:
            part: its code and the module that it is a method of.
            nodes: how many nodes its graph has; 0 where there is none.
        """
        self._frames += 1
        self.graphs += nodes > 0
        self._nodes += nodes
        self._work[part] = max(self._work.get(part, 0), nodes)

    @property
    def is_mostly_python(self) -> bool:
        """Whether most functions traced, of many, have no graph, and others a small."""
        few = self._nodes < _FEW_IN_FRAMES * self._frames
        return self._frames > _MOST_FRAMES and few and 2 * self.graphs < self._frames

    @property
    def too_much(self) -> str:
        """Why no more is to be captured; "" while more may be."""
        graphs, nodes, work = self.graphs, self._nodes, sum(self._work.values())
        frames = self._frames
        if graphs > _MOST_SMALL_GRAPHS and nodes < _FEW_NODES * graphs:
            return (
                f"Dynamo made {graphs} graphs of it, of {nodes // graphs} nodes on "
                "average: graphs break at hooks, .item() and print "
                "(TORCH_LOGS=graph_breaks tells where)"
            )
        if self.is_mostly_python:
            return (
                f"Dynamo traced {frames} functions of it and found {nodes} tensor ops: "
                "it is mostly Python.  Convert the modules in it that compute"
            )
        if nodes > _MOST_TIMES * work + _FREE_NODES:
            return (
                f"Dynamo captured {nodes} nodes, for a call that has {work}: each call "
                "needs graphs of its own (TORCH_LOGS=recompiles tells why)"
            )
        return ""
