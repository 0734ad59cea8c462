"""What ranks know of each other: one rank's overflow is an overflow on all of them.

`compat.active_ddp_group` and `compat.shard_groups` find the process groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def shared(flag: torch.Tensor, groups: Iterable[Any]) -> torch.Tensor:
    """`flag` (1 element), 1 where it is 1 on any rank of the process groups `groups`.

    Ranks step together or not at all: one rank's part of the gradients may be finite
    where another rank's was not, and clipped before any rank could see it.
    """
    for group in {id(group): group for group in groups}.values():
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group)
    return flag


def are_several() -> bool:
    """Whether this process is one of several ranks."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
