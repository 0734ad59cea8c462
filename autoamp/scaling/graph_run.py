"""One run of a scaled graph: which gradients it fills, and whether they overflowed."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from autoamp import compat
from autoamp.scaling.domain import ModelScaling
from autoamp.scaling.leaves import Leaves, Origin


class Backward:
    """One backward pass, which moves a loss scale once, however many runs it reaches.

    Attributes:
        counted: the flag by which it has moved; None before.  Optimizers that step
            inside the backward move it before all is known.
    """

    __slots__ = ("counted",)

    def __init__(self) -> None:
        self.counted: torch.Tensor | None = None

    def count(self, flag: torch.Tensor) -> None:
        """The loss scale has moved by `flag`."""
        known = self.counted
        self.counted = flag if known is None else flag.maximum(known.to(flag.device))

    @property
    def overflowed(self) -> bool:
        """Whether the loss scale was lowered for it; may wait for the device."""
        return self.counted is not None and bool(self.counted)


class GraphRun:
    """One run of a graph, whose backward may find an overflow.

    Attributes:
        found_inf: one flag per device, set by the graph's own backward.
        leaves: the leaf inputs whose `.grad` the backward fills.
        origin: the graph.
        task: the backward that reached it; -1 before.
        backward: the same, and how the loss scale has moved by it.
        number: its place in the order of backwards.
        gone: ids of the leaves whose gradients were thrown away after it.
        counted: the loss scale has moved by all that it found.
        clean: it is known that it found nothing.
        seen: how large the fp16 gradients inside were, at the scale of the run, which
            comes last; None where nobody looks.
        recorded: a backward over it was itself recorded (`create_graph`), and a later
            one may set its flags before it gets to the outputs.
    """

    __slots__ = (
        "_open",
        "backward",
        "clean",
        "counted",
        "found_inf",
        "gone",
        "group",
        "leaves",
        "number",
        "origin",
        "recorded",
        "scaling",
        "seen",
        "task",
    )

    def __init__(
        self,
        scaling: ModelScaling,
        origin: Origin,
        leaves: Leaves,
        edge: Sequence[torch.Tensor],
    ) -> None:
        """Args: `edge` is what `ModelScaling.inputs` gave for this run."""
        self.scaling = scaling
        self.origin = origin
        self.leaves = leaves
        self.found_inf = edge[2::3]
        self.group = compat.active_ddp_group()
        self.task = -1
        self.backward = Backward()
        self.number = -1
        self.gone: frozenset[int] = frozenset()
        self.counted = self.clean = self.recorded = False
        self._open = edge if scaling.scalers else None
        self.seen: tuple[list[torch.Tensor], torch.Tensor] | None = None

    def look(self, edge: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A list for the magnitudes of its fp16 gradients; `edge` as for the run."""
        self.seen = [], edge[1]
        return self.seen[0]

    @property
    def largest(self) -> torch.Tensor | None:
        """The largest fp16 gradient seen inside, at its true value."""
        if self.seen is None or not self.seen[0]:
            return None
        magnitudes, inverse = self.seen
        return torch.stack([m.to(inverse.device) for m in magnitudes]).amax() * inverse

    def settle(self) -> None:
        """Settles whether a GradScaler has scaled the loss, and so this run is not."""
        if self._open is not None and self.scaling.decide():
            for scale, inverse in zip(self._open[::3], self._open[1::3], strict=True):
                for given in (scale, inverse):
                    with compat.version_kept(given):  # a compiled backward has saved it
                        given.fill_(1.0)
        self._open = None

    @property
    def overflowed_on_host(self) -> bool:
        """Whether it found an overflow; no, where one would have to wait to know."""
        return any(f.device.type == "cpu" and bool(f) for f in self.found_inf)

    @property
    def voided(self) -> bool:
        """Whether all gradients it filled were thrown away."""
        return bool(self.gone) and len(self.gone) == len(self.leaves.known)

    @property
    def is_orphaned(self) -> bool:
        """Whether its weights are gone, or moved: others may have their ids by now."""
        return self.leaves.stale

    @property
    def is_of_nobody(self) -> bool:
        """Whether the weights are gone, and the model with them."""
        return self.is_orphaned and self.origin.graph() is None

    def touches(self, held: Mapping[int, torch.Tensor]) -> bool:
        """Whether its backward filled the gradient of one of the tensors `held`.

        The tensors are given by their `id`, and lie where they lay in that backward.
        """
        return self.leaves.are_among(held)

    def may_touch(self, ids: Collection[int]) -> bool:
        """Whether it did so with tensors that had the same ids then."""
        return not self.leaves.known.isdisjoint(ids)

    def lives_in(self, ids: Collection[int]) -> bool:
        """Whether what it filled is still in the gradients of the tensors `ids`."""
        return not (self.leaves.known - self.gone).isdisjoint(ids)

    def throw_away(self, leaves: Iterable[torch.Tensor], in_place: bool) -> None:
        """Notes which of the gradients it filled of `leaves` are gone, or zeroed."""
        left = self.leaves.known - self.gone
        gone = [
            id(leaf)
            for leaf in leaves
            if id(leaf) in left
            and (leaf.grad is None or (in_place and _is_zero(leaf.grad)))
        ]
        self.gone |= frozenset(gone)

    def set_apart(self) -> GraphRun:
        """What it has found so far; itself it begins anew, for another backward."""
        past = copy.copy(self)
        past.found_inf = [flag.clone() for flag in self.found_inf]
        self.begin()
        return past

    def begin(self) -> None:
        """Makes it a run that has found nothing."""
        for flag in self.found_inf:
            with compat.version_kept(flag):
                flag.zero_()


def largest_of(
    backwards: set[Backward], runs: Sequence[GraphRun]
) -> torch.Tensor | None:
    """The largest fp16 gradient in `backwards`; None where it is not all seen."""
    found = [run.largest for run in runs if run.backward in backwards]
    seen = [each for each in found if each is not None]
    if compat.inside_backward() or not seen or len(seen) < len(found):
        return None
    return torch.stack([each.to(seen[0].device) for each in seen]).amax()


def _is_zero(grad: torch.Tensor) -> bool:
    return (
        grad.device.type == "cpu"
        and grad.layout == torch.strided
        and not bool(grad.any())
    )
