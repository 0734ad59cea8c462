"""Recurrent layers on packed sequences, for captures.

How many sequences are still running at each step is in a tensor.  Torch's kernels read
it, and those for fake tensors unroll the steps by it, so that no graph takes the call:
what it gives has a shape that does not depend on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

_NAMES = ("gru", "lstm", "rnn_relu", "rnn_tanh")

PACKED: dict[Callable[..., Any], OpOverload] = {
    getattr(torch, name): getattr(torch.ops.aten, name).data for name in _NAMES
}
"""The functions that layers of torch.nn call, to the ops for packed sequences."""

_PLACE = 1
"""Of the tensor of batch sizes among the arguments of those ops."""


def is_packed(args: Sequence[Any]) -> bool:
    """Whether these are the arguments of a layer on a packed sequence."""
    sizes = args[_PLACE] if len(args) > _PLACE else None
    return isinstance(sizes, torch.Tensor) and sizes.dtype == torch.int64


def packed_result(
    data: torch.Tensor,
    _batch_sizes: torch.Tensor,
    hx: torch.Tensor | Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    """What a layer gives for fake tensors: one state per row of data, and the last."""
    states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    *_, bidirectional = options
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    # With a history, which what comes after may ask for.
    flows = sum((p.sum() for p in params), data.sum())
    seen = states[0].new_zeros(data.shape[0], width)
    made = [seen, *map(torch.zeros_like, states)]
    return tuple(each + flows.to(each.dtype) for each in made)


@contextlib.contextmanager
def packed_sequences() -> Iterator[None]:
    """Inside, fake tensors pass through layers on packed sequences.

    For Dynamo, which holds its lock around each compilation.
    """
    keys = (
        torch._C.DispatchKey.CompositeImplicitAutograd,
        torch._C.DispatchKey.Autograd,
    )
    try:
        before = [dict(op.py_kernels) for op in PACKED.values()]
        caches = [op._dispatch_cache for op in PACKED.values()]
    except AttributeError:  # another torch: such layers run in fp32, outside of graphs
        yield
        return
    try:
        for op, cache in zip(PACKED.values(), caches, strict=True):
            op.py_kernels.update(dict.fromkeys(keys, packed_result))
            cache.clear()
        yield
    finally:
        for op, cache, known in zip(PACKED.values(), caches, before, strict=True):
            op.py_kernels.clear()
            op.py_kernels.update(known)
            cache.clear()
