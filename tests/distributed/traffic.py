"""Counts what FSDP gathers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """The bytes of each all-gather of FSDP."""
    import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives

    sizes: list[int] = []
    gather: Any = collectives.DefaultAllGather
    original = gather.__call__

    def counted(self: Any, output_tensor: Tensor, *args: Any, **kw: Any) -> Any:
        sizes.append(output_tensor.numel() * output_tensor.itemsize)
        return original(self, output_tensor, *args, **kw)

    gather.__call__ = counted
    try:
        yield sizes
    finally:
        gather.__call__ = original
