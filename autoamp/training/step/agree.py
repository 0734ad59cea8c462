"""Makes the flag, the sizes of gradients and the loss scales the same on all ranks.

Ranks step together or not at all, and a rank that skips a collective hangs all others.
So a rank takes part in an agreement because of the weights that its optimizer holds,
never because of what the rank's own graphs did in the step: a rank's model may have run
no graph at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoamp.errors import RankError
from autoamp.training.ledger.graph_run import Sizes
from autoamp.training.rank_handshake import shake_hands
from autoamp.training.ranks import Team, judged
from autoamp.training.scale import LossScale
from autoamp.training.scale.base import free_to_read, scalar
from autoamp.training.step.boundary import OptimizerBoundary
from autoamp.training.step.read import Reading

_SCALES = 4
"""The most loss scales of one optimizer that ranks keep equal.  Models joined by a
backward share one scale, and a vector of one length needs no second collective."""

_SILENT, _UNKNOWN = -torch.inf, torch.inf
"""A number with no part in a largest value, and one that makes the value unknown."""

_INFINITE = torch.finfo(torch.float32).max
"""Stands for a gradient that is not finite."""


def agree(boundary: OptimizerBoundary, reading: Reading) -> Reading:
    """The reading that holds on all ranks; makes the loss scales equal there.

    Raises:
        RankError: a rank has left; or, at the first step, a rank does not answer, or
            has converted its models otherwise.
    """
    team = reading.team
    if not team.groups:
        return reading
    scalings = judged(boundary.scalings)
    shake_hands(boundary.optimizer, team, scalings, reading.params)
    if team.is_joining:  # the gradients were looked at, and they are the same
        flag, sizes = reading.flag, dict.fromkeys(reading.sizes)
    else:
        flag, sizes = _reduced(team, reading, boundary.loss_scales)
    team.recover(flag)
    return reading._replace(flag=flag, sizes=sizes)


def _reduced(
    team: Team, reading: Reading, scales: Sequence[LossScale]
) -> tuple[torch.Tensor, Sizes]:
    """The largest flag and sizes of all ranks, by one reduction of one small vector.

    The same reduction makes the loss scales equal.  A loss scale takes the lowest of
    the ranks' values, if it has come to differ: after uneven inputs, say.
    """
    flag, sizes = reading.flag, reading.sizes
    scales = scales[:_SCALES]
    rows = [_row(scale, sizes) for scale in scales]
    rows += [[scalar(_SILENT)] * 3] * (_SCALES - len(scales))
    numbers = [flag.reshape(()), *(number for row in rows for number in row)]
    ours = torch.stack([n.to(team.device, torch.float32) for n in numbers])
    agreed = ours.clone()
    try:
        for group in team.groups:
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX, group)
    except RuntimeError as error:
        raise _left_alone(error) from error
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


def _left_alone(error: RuntimeError) -> RankError:
    return RankError(
        "a rank does not take part in the agreement whether to make this optimizer "
        f"step: {str(error).partition(chr(10))[0]}. It has died or raised, or it steps "
        "another optimizer: see what each rank said last, and start all ranks again"
    )


def _row(scale: LossScale, sizes: Sizes) -> list[torch.Tensor]:
    if id(scale) not in sizes:
        return [scalar(_SILENT)] * 3
    largest = sizes[id(scale)]
    if largest is None:
        largest = scalar(_UNKNOWN)
    else:
        largest = largest.nan_to_num(_INFINITE, _INFINITE)
    return [*(-each for each in scale.position), largest]


def _size(largest: torch.Tensor) -> torch.Tensor | None:
    if not bool(largest < _UNKNOWN):
        return None
    return torch.where(largest < _INFINITE, largest, torch.inf)
