"""A process group of this process alone, for programs on DTensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


@contextlib.contextmanager
def one_rank() -> Iterator[Any]:
    """A mesh of one rank: shards are whole there, and graphs have their calls."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()
