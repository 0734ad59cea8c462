"""One run of a scaled graph: which gradients it fills, and whether they overflowed."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from autoamp import compat
from autoamp.training.ledger.leaves import Leaves, Origin
from autoamp.training.model_scaling import ModelScaling

Sizes = dict[int, torch.Tensor | None]
"""The largest fp16 gradient of a step by the `id` of the loss scale; None where it is
not known.  A loss scale that no run of the step used has no entry."""


class BackwardPass:
    """One backward pass, which moves a loss scale once, however many runs it reaches.

    Attributes:
        moved_by: the flag by which the loss scale has moved; None before.  Optimizers
            that step inside the backward move the scale before all flags are known.
    """

    __slots__ = ("moved_by",)

    def __init__(self) -> None:
        self.moved_by: torch.Tensor | None = None

    def note_move(self, flag: torch.Tensor) -> None:
        """Notes that the loss scale has moved by `flag`."""
        known = self.moved_by
        self.moved_by = flag if known is None else flag.maximum(known.to(flag.device))

    @property
    def overflowed(self) -> bool:
        """Whether the loss scale was lowered for the backward; may wait for a GPU."""
        return self.moved_by is not None and bool(self.moved_by)


class GraphRun:
    """One run of a graph, whose backward may find an overflow.

    Attributes:
        found_inf: one flag per device, set by the graph's own backward.
        leaves: the leaf inputs whose `.grad` the backward fills.
        origin: the graph, and which of its inputs are leaves.
        backward_id: torch's id of the backward that reached the run; -1 before.
        backward_pass: the same backward, with the flag by which the scale has moved.
        number: the run's place in the order in which backwards reached the runs.
        gone: ids of the leaves whose gradients were thrown away after the backward.
        scale_moved: whether the loss scale has moved by all that the run found.
        clean: whether the run is known to have found nothing.
        magnitudes: the sizes of the fp16 gradients inside, at the run's loss scale, and
            the inverse of that scale; None where the loss scale does not ask for them.
        reduced: whether DistributedDataParallel reduces the run's gradients.
        recorded: whether a backward over the run was itself recorded (`create_graph`):
            then a later backward may set the flags before it gets to the outputs.
    """

    __slots__ = (
        "_open",
        "backward_id",
        "backward_pass",
        "clean",
        "found_inf",
        "gone",
        "leaves",
        "magnitudes",
        "number",
        "origin",
        "recorded",
        "reduced",
        "scale_moved",
        "scaling",
    )

    def __init__(
        self,
        scaling: ModelScaling,
        origin: Origin,
        leaves: Leaves,
        edge: Sequence[torch.Tensor],
    ) -> None:
        """Args: `edge` holds the inputs that `inputs_of_run` gave for the run."""
        self.scaling = scaling
        self.origin = origin
        self.leaves = leaves
        self.found_inf = edge[2::3]
        self.reduced = compat.active_ddp() is not None
        self.backward_id = -1
        self.backward_pass = BackwardPass()
        self.number = -1
        self.gone: frozenset[int] = frozenset()
        self.scale_moved = self.clean = self.recorded = False
        self._open = edge if scaling.ledger.scalers else None
        self.magnitudes: tuple[list[torch.Tensor], torch.Tensor] | None = None

    def begin_sizes(self, edge: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A list for the magnitudes of the fp16 gradients; `edge` as in `__init__`."""
        self.magnitudes = [], edge[1]
        return self.magnitudes[0]

    @property
    def largest(self) -> torch.Tensor | None:
        """The largest fp16 gradient seen inside, at its true value."""
        if self.magnitudes is None or not self.magnitudes[0]:
            return None
        magnitudes, inverse = self.magnitudes
        return torch.stack([m.to(inverse.device) for m in magnitudes]).amax() * inverse

    def unscale_if_foreign(self) -> None:
        """Sets the run's scale to 1 where a GradScaler turns out to scale the loss."""
        if self._open is not None and self.scaling.ledger.a_scaler_scales():
            for scale, inverse in zip(self._open[::3], self._open[1::3], strict=True):
                for given in (scale, inverse):
                    with compat.version_kept(given):  # saved by a compiled backward
                        given.fill_(1.0)
        self._open = None

    @property
    def overflowed_on_host(self) -> bool:
        """Whether a flag in host memory is set; flags on other devices are not read."""
        return any(f.device.type == "cpu" and bool(f) for f in self.found_inf)

    @property
    def voided(self) -> bool:
        """Whether all gradients that the run filled were thrown away."""
        return bool(self.gone) and len(self.gone) == len(self.leaves.known)

    @property
    def is_orphaned(self) -> bool:
        """Whether the weights are gone, or moved: other tensors may have their ids."""
        return self.leaves.stale

    @property
    def is_of_nobody(self) -> bool:
        """Whether the weights are gone, and the model with them."""
        return self.is_orphaned and self.origin.graph() is None

    def touches(self, held: Mapping[int, torch.Tensor]) -> bool:
        """Whether the run's backward filled the gradient of one of the tensors `held`.

        The tensors are given by their `id`.  A tensor counts only if it still lies in
        the memory that it had in the run.
        """
        return self.leaves.are_among(held)

    def may_touch(self, ids: Collection[int]) -> bool:
        """Whether the run filled gradients of tensors that had some of `ids` then."""
        return not self.leaves.known.isdisjoint(ids)

    def lives_in(self, ids: Collection[int]) -> bool:
        """Whether a gradient that the run filled is still in a tensor of `ids`."""
        return not (self.leaves.known - self.gone).isdisjoint(ids)

    def throw_away(self, leaves: Iterable[torch.Tensor], in_place: bool) -> None:
        """Notes which gradients of `leaves` that the run filled are gone.

        Args:
            in_place: whether a gradient that is zero counts as gone too.
        """
        left = self.leaves.known - self.gone
        gone = [
            id(leaf)
            for leaf in leaves
            if id(leaf) in left
            and (leaf.grad is None or (in_place and _is_zero(leaf.grad)))
        ]
        self.gone |= frozenset(gone)

    def set_apart(self) -> GraphRun:
        """A copy with the flags so far; the run itself begins anew, for a backward."""
        past = copy.copy(self)
        past.found_inf = [flag.clone() for flag in self.found_inf]
        self.begin()
        return past

    def begin(self) -> None:
        """Clears the flags: the run has found nothing."""
        for flag in self.found_inf:
            with compat.version_kept(flag):
                flag.zero_()


def largest_of(
    backwards: set[BackwardPass], runs: Sequence[GraphRun]
) -> torch.Tensor | None:
    """The largest fp16 gradient in `backwards`; None where some were not seen (yet)."""
    found = [run.largest for run in runs if run.backward_pass in backwards]
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
