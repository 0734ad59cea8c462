"""Where the gradients of a captured graph go, which is a matter of each call.

Dynamo captures once what is a leaf of autograd's graph in one call (an input somebody
optimizes) and what others computed in the next (a generator's output).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx


class Leaves:
    """The leaf inputs that runs of a graph share; not the weights themselves.

    Attributes:
        ids: the `id` of each, in order.
        known: the same, as a set.
        stale: one of them is gone, and another tensor may have its id.
    """

    __slots__ = ("__weakref__", "_refs", "ids", "known", "stale")

    def __init__(self, tensors: Sequence[torch.Tensor], ids: list[int]) -> None:
        self.ids = ids
        self.known = frozenset(ids)
        self.stale = False
        mine = weakref.ref(self)

        def died(_: Any) -> None:
            leaves = mine()
            if leaves is not None:
                leaves.stale = True

        self._refs = [weakref.ref(tensor, died) for tensor in tensors]

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Those that are still there, each with its id."""
        for number, ref in zip(self.ids, self._refs, strict=True):
            leaf = ref()
            if leaf is not None:
                yield number, leaf

    @property
    def first(self) -> torch.Tensor | None:
        """The first of them, while it is there."""
        return self._refs[0]() if self._refs else None


class Origin:
    """A graph, and where its gradients go while the same inputs are leaves.

    Attributes:
        gm: the graph, while it lives.
        places: where among its inputs the leaves are.
        passes_on: gradients leave it through inputs that others computed.
    """

    def __init__(
        self, gm: weakref.ref[fx.GraphModule], places: list[int], passes_on: bool
    ) -> None:
        self.gm = gm
        self.places = places
        self.passes_on = passes_on
        self._leaves: Leaves | None = None

    def leaves(self, args: Sequence[Any]) -> Leaves:
        """The leaves among the inputs `args`; the same object while they are."""
        ids = [id(args[i]) for i in self.places]
        known = self._leaves
        if known is None or known.stale or known.ids != ids:
            self._leaves = known = Leaves([args[i] for i in self.places], ids)
        return known


class Origins:
    """The origins of the runs of one graph."""

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], exits: Sequence[int]
    ) -> None:
        """Args: `inputs` it was captured with; gradients leave at positions `exits`."""
        self._gm = weakref.ref(gm)
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
            places = sorted([*self._always, *more])
            self._known[pattern] = Origin(self._gm, places, passes_on)
        return self._known[pattern]


def _needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_weight(value: torch.Tensor) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.is_leaf
