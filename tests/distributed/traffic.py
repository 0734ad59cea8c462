"""Counts what ranks send: FSDP's gathers, and the collectives on DTensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
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


@contextlib.contextmanager
def wire(ranks: int) -> Iterator[list[tuple[str, float]]]:
    """The collectives on DTensors, each with the bytes that a rank of a ring sends.

    A gather of parts of n bytes by r ranks sends (r - 1) n bytes, a reduction with a
    scatter, or an exchange, (r - 1) / r of what it is given, an all-reduce twice that
    (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms").
    """
    import torch.distributed._functional_collectives as functional

    share = (ranks - 1) / ranks
    factors = {
        (functional, "all_gather_single"): (0, ranks - 1),
        (functional, "reduce_scatter_single"): (0, share),
        (functional, "all_reduce"): (0, 2 * share),
        (torch.distributed, "all_to_all_single"): (1, share),
    }
    sent: list[tuple[str, float]] = []
    with contextlib.ExitStack() as stack:
        for (module, name), (at, factor) in factors.items():
            stack.enter_context(_counted(module, name, at, factor, sent))
        yield sent


@contextlib.contextmanager
def _counted(
    module: Any, name: str, at: int, factor: float, sent: list[tuple[str, float]]
) -> Iterator[None]:
    original = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent.append((name, args[at].numel() * args[at].itemsize * factor))
        return original(*args, **kwargs)

    setattr(module, name, counted)
    try:
        yield
    finally:
        setattr(module, name, original)


class Collective(NamedTuple):
    """A collective that gloo has made, and how many numbers this rank gave to it."""

    name: str
    numbers: int


@contextlib.contextmanager
def collectives() -> Iterator[list[Collective]]:
    """The collectives of all kinds, those of DDP's reducer too; filled at the end."""
    found: list[Collective] = []
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        yield found
    events: Any = profile.function_events
    found += [
        Collective(
            event.name.removeprefix(_GLOO),
            sum(math.prod(shape) for shape in event.input_shapes),
        )
        for event in events
        if event.name.startswith(_GLOO)
    ]


_GLOO = "gloo:"
