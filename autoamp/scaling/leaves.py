"""Which leaves the gradients of a run go to: weights, and inputs somebody optimizes.

Dynamo captures once what is a leaf of autograd's graph in one call (an input somebody
optimizes) and what others computed in the next (a generator's output).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from autoamp import compat


class RunsGraph(Protocol):
    """The owner of a graph: runs of the graph outlive the owner."""

    @property
    def gm(self) -> fx.GraphModule:
        """The graph that is run."""


class Leaves:
    """The leaf inputs that runs of a graph share, by their `id`.

    Not the tensors, which a run outlives, nor references to them: torch refuses to
    swap a tensor that is weakly referred to.

    Attributes:
        ids: the `id` of each, in order.
        known: the same, as a set.
        memories: of each, by its `id`.
    """

    __slots__ = ("ids", "known", "memories")

    def __init__(self, tensors: Sequence[torch.Tensor], ids: list[int]) -> None:
        self.ids = ids
        self.known = frozenset(ids)
        self.memories = dict(zip(ids, map(compat.memory_of, tensors), strict=True))

    @property
    def stale(self) -> bool:
        """Whether their memory is gone: other tensors may have their ids by now.

        Or the same tensors, where they were given other memory meanwhile.
        """
        return bool(self.ids) and self.memories[self.ids[0]]() is None

    def are_among(self, held: Mapping[int, torch.Tensor]) -> bool:
        """Whether some of `held`, by their `id`, are leaves, not others with such ids.

        A leaf is where it was; one that was given other memory is not told from others.
        """
        known = self.memories.items()
        return any(i in held and compat.lies_in(held[i], where) for i, where in known)


class Origin:
    """A graph, and where its gradients go while the same inputs are leaves.

    Attributes:
        graph: the graph as its model runs it, while that lives.
        places: where among its inputs the leaves are.
        passes_on: gradients leave it through inputs that others computed.
    """

    def __init__(
        self, graph: weakref.ref[RunsGraph], places: list[int], passes_on: bool
    ) -> None:
        self.graph = graph
        self.places = places
        self.passes_on = passes_on
        self._leaves: Leaves | None = None

    def leaves(self, args: Sequence[Any]) -> tuple[list[torch.Tensor], Leaves]:
        """The leaves among the inputs `args`; the same object while they are."""
        tensors = [args[i] for i in self.places]
        ids = list(map(id, tensors))
        known = self._leaves
        if known is None or known.stale or known.ids != ids:
            self._leaves = known = Leaves(tensors, ids)
        return tensors, known


class Origins:
    """The origins of the runs of one graph."""

    def __init__(
        self, graph: RunsGraph, inputs: Sequence[Any], exits: Sequence[int]
    ) -> None:
        """Args: `inputs` of a run of it; gradients leave at positions `exits`."""
        self._graph = weakref.ref(graph)
        self._exits = exits
        self._known: dict[tuple[bool, ...], Origin] = {}
        needing = [i for i, v in enumerate(inputs) if _needs_grad(v)]
        # Dynamo captures anew where a parameter becomes an ordinary tensor, and where
        # `requires_grad` changes: nothing else is asked about at each call.
        self._asked = [i for i in needing if not _is_weight(inputs[i])]
        self._always = [i for i in needing if _is_weight(inputs[i])]

    def of(self, args: Sequence[Any]) -> Origin:
        """The origin of a run with the inputs `args`."""
        pattern = tuple([args[i].is_leaf for i in self._asked])
        if pattern not in self._known:
            more = [i for i, leaf in zip(self._asked, pattern, strict=True) if leaf]
            given = set(self._asked).difference(more)
            passes_on = not given.isdisjoint(self._exits)
            # Weights come first: runs are known by the memory of their first leaf, and
            # an input of the caller's lives for one run, or longer than the model.
            places = [*self._always, *more]
            self._known[pattern] = Origin(self._graph, places, passes_on)
        return self._known[pattern]


def _needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_weight(value: torch.Tensor) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.is_leaf
