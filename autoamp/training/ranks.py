"""What ranks agree on at every step: overflow, sizes of gradients, loss scales.

Ranks step together or not at all, and a rank that skips a collective hangs all others.
So a rank takes part in an agreement because of the weights that its optimizer holds,
never because of what the rank's own graphs did in the step: a rank's model may have run
no graph at all.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoamp import compat
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.scale import LossScale
from autoamp.training.scale.base import free_to_read

Sizes = dict[int, torch.Tensor | None]
"""The largest fp16 gradient of a step by the `id` of the loss scale; None where it is
not known.  A loss scale that no run of the step used has no entry."""

_SCALES = 4
"""The most loss scales of one optimizer that ranks keep equal.  Models joined by a
backward share one scale, and a vector of one length needs no second collective."""

_SILENT, _UNKNOWN = -torch.inf, torch.inf
"""A number with no part in a largest value, and one that makes the value unknown."""

_INFINITE = torch.finfo(torch.float32).max
"""Stands for a gradient that is not finite."""


@dataclass(frozen=True)
class Team:
    """The ranks that step the weights of one optimizer together.

    Attributes:
        groups: their process groups, the same and in the same order on each of them.
        reducers: the instances of DistributedDataParallel that reduce the gradients.
        device: where tensors are that ranks exchange; None where there are no others.
        staged: whether the ranks hold stages of one pipeline, each of its own weights.
    """

    groups: Sequence[Any] = ()
    reducers: Sequence[Any] = ()
    device: torch.device | None = None
    staged: bool = False

    @property
    def is_joining(self) -> bool:
        """Whether some ranks may be out of inputs: these make no steps."""
        return any(map(compat.is_joining, self.reducers))

    @property
    def gradients_tell_more(self) -> bool:
        """Whether the reduction itself may make gradients overflow, in fp16 say."""
        return any(map(_is_hooked, self.reducers))

    def recover(self, flag: torch.Tensor) -> None:
        """Clears what communication hooks keep of an overflow (`flag` is not 0)."""
        hooked = [*filter(_is_hooked, self.reducers)]
        if hooked and bool(flag):
            for each in hooked:
                compat.forget_feedback(each)


ALONE = Team()

_hooked: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _is_hooked(reducer: Any) -> bool:
    """Whether a reducer has a communication hook, which it cannot get after a step."""
    if reducer not in _hooked:
        _hooked[reducer] = compat.has_communication_hook(reducer)
    return _hooked[reducer]


def judged(scalings: Iterable[ModelScaling]) -> list[ModelScaling]:
    """Those of `scalings` for which steps may be skipped, about which ranks agree.

    Whether graphs of a model run low is not asked, because ranks may differ in that.
    """
    return [scaling for scaling in scalings if scaling.enabled or scaling.ledger.guards]


def team_of(scalings: Iterable[ModelScaling], params: Sequence[torch.Tensor]) -> Team:
    """The team of an optimizer that holds `params`, of models with `scalings`."""
    scalings = list(dict.fromkeys(scalings))
    if not scalings or not compat.are_several():
        return ALONE
    reducers = [each for s in scalings for each in s.ledger.reducers]
    groups = [each.process_group for each in reducers]
    groups += compat.shard_groups(params)
    groups += [each for s in scalings for each in s.stage_groups]
    if not groups:
        return ALONE
    weight = next(itertools.chain(params, *(each.parameters() for each in reducers)))
    device = compat.reached_on(groups[0], weight.device)
    staged = any(s.stage_groups for s in scalings)
    return Team([*{id(g): g for g in groups}.values()], reducers, device, staged)


def owners_of(
    params: Sequence[torch.Tensor], scalings: Iterable[ModelScaling]
) -> list[ModelScaling]:
    """Those of `scalings` whose models' weights are among `params` on several ranks.

    Ranks agree on steps of such weights even where this rank's model ran no graph.
    """
    if not compat.are_several():
        return []
    held = set(map(id, params))
    return [s for s in scalings if not held.isdisjoint(map(id, s.weights))]


def agree(
    team: Team, flag: torch.Tensor, scales: Sequence[LossScale], sizes: Sizes
) -> tuple[torch.Tensor, Sizes]:
    """The flag and sizes that hold on all ranks; makes the loss scales equal there.

    One reduction of one small vector serves all three.  A loss scale takes the lowest
    of the ranks' values, if it has come to differ: after uneven inputs, say.

    Args:
        flag: 1 element, 1 where this rank found an overflow.
        scales: the optimizer's loss scales.
        sizes: what this rank saw of its gradients.
    """
    if not team.groups:
        return flag, sizes
    if team.is_joining:  # the gradients were looked at, and they are the same
        return flag, dict.fromkeys(sizes)
    scales = scales[:_SCALES]
    rows = [_row(scale, sizes) for scale in scales]
    rows += [[torch.tensor(_SILENT)] * 3] * (_SCALES - len(scales))
    numbers = [flag.reshape(()), *(number for row in rows for number in row)]
    ours = torch.stack([n.to(team.device, torch.float32) for n in numbers])
    agreed = ours.clone()
    for group in team.groups:
        torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX, group)
    known = free_to_read(agreed)
    for scale, mine, other in zip(
        scales, ours[1:].split(3), agreed[1:].split(3), strict=False
    ):
        if not (known and torch.equal(mine[:2], other[:2])):
            scale.set_agreed(-other[0], -other[1])
        if (
            id(scale) in sizes and scale.wants_size
        ):  # the few looks may wait for a device
            sizes[id(scale)] = _size(other[2])
    return agreed[:1], sizes


def _row(scale: LossScale, sizes: Sizes) -> list[torch.Tensor]:
    if id(scale) not in sizes:
        return [torch.tensor(_SILENT)] * 3
    largest = sizes[id(scale)]
    if largest is None:
        largest = torch.tensor(_UNKNOWN)
    else:
        largest = largest.nan_to_num(_INFINITE, _INFINITE)
    return [*(-each for each in scale.position), largest]


def _size(largest: torch.Tensor) -> torch.Tensor | None:
    if not bool(largest < _UNKNOWN):
        return None
    return torch.where(largest < _INFINITE, largest, torch.inf)
