"""The leaves that the gradients of a run go to: weights, and optimized inputs.

The same input of one captured graph may be a leaf of autograd's graph in one call (an
image that is optimized) and a computed tensor in the next (a generator's output):
Dynamo does not capture anew for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoamp import compat


class Leaves:
    """The leaf inputs that runs of a graph share, by their `id`.

    The tensors themselves are not kept, because a run outlives them, and weak
    references are not kept, because torch refuses to swap a tensor that has one.

    Attributes:
        ids: the `id` of each leaf, in order.
        memories: the memory of each leaf, by the leaf's `id`.
        groups: the ranks that compute with the leaves together, where these are
            DTensors: their graphs add up gradients of all ranks, which are scaled.
    """

    __slots__ = ("groups", "ids", "memories")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.ids = list(map(id, tensors))
        memories = map(compat.memory_of, tensors)
        self.memories = dict(zip(self.ids, memories, strict=True))
        meshed = [*filter(compat.is_distributed, tensors)]
        self.groups = compat.shard_groups(meshed) if meshed else []

    @property
    def stale(self) -> bool:
        """Whether the leaves' memory is gone: other tensors may have their ids by now.

        Leaves that were given other memory meanwhile are stale as well.
        """
        return bool(self.ids) and self.memories[self.ids[0]]() is None

    def are_among(self, held: Mapping[int, torch.Tensor]) -> bool:
        """Whether some of `held`, tensors by their `id`, are among the leaves.

        A tensor with a leaf's id must also lie in the leaf's memory: a leaf that was
        given other memory cannot be told from another tensor.
        """
        known = self.memories.items()
        return any(i in held and compat.lies_in(held[i], where) for i, where in known)


class Origin:
    """A graph, and where its gradients go while the same inputs are leaves.

    Attributes:
        graph: a weak reference to the captured graph, which its runs may outlive.
        positions: the positions of the leaves among the graph's inputs.
        computed: the positions of computed inputs that gradients leave through.
    """

    def __init__(
        self, graph: weakref.ref[Any], positions: list[int], computed: list[int]
    ) -> None:
        self.graph = graph
        self.positions = positions
        self.computed = computed
        self._leaves: Leaves | None = None

    def leaves(self, args: Sequence[Any]) -> tuple[list[torch.Tensor], Leaves]:
        """The leaves among `args`; the `Leaves` stay one object while the ids do."""
        tensors = [args[i] for i in self.positions]
        known = self._leaves
        if known is None or known.stale or known.ids != list(map(id, tensors)):
            self._leaves = known = Leaves(tensors)
        return tensors, known


class Origins:
    """The origins of the runs of one graph."""

    def __init__(
        self, graph: object, inputs: Sequence[Any], exits: Sequence[int]
    ) -> None:
        """Args: `inputs` of one run; gradients leave at the inputs `exits`."""
        self._graph = weakref.ref(graph)
        self._exits = exits
        self._known: dict[tuple[bool, ...], Origin] = {}
        tensors = [i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor)]
        needing = [i for i in tensors if inputs[i].requires_grad]
        # Dynamo captures anew where a parameter becomes an ordinary tensor, and where
        # `requires_grad` changes: so a call only asks whether other inputs are leaves.
        self._asked = [i for i in needing if not _is_weight(inputs[i])]
        self._always = [i for i in needing if _is_weight(inputs[i])]

    def of(self, args: Sequence[Any]) -> Origin:
        """The origin of a run with the inputs `args`."""
        pattern = tuple([args[i].is_leaf for i in self._asked])
        if pattern not in self._known:
            more = [i for i, leaf in zip(self._asked, pattern, strict=True) if leaf]
            given = set(self._asked).difference(more)
            computed = [i for i in self._exits if i in given]
            # Weights come first: runs are known by the memory of their first leaf, and
            # a caller's input may live for one run, or longer than the model.
            positions = [*self._always, *more]
            self._known[pattern] = Origin(self._graph, positions, computed)
        return self._known[pattern]


def _is_weight(value: torch.Tensor) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.is_leaf
