"""Recurrent layers, whose results a trace makes without their steps.

For recurrent layers torch's kernels for fake tensors make every operation of every
step.  For a packed sequence, a tensor says how many rows still run at each step, and
those kernels read that tensor, so that no graph can hold the call.  The shapes of the
results depend on neither the operations nor that tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

_NAMES = ("gru", "lstm", "rnn_relu", "rnn_tanh")

_States = torch.Tensor | Sequence[torch.Tensor]

PACKED: dict[Callable[..., Any], OpOverload] = {
    getattr(torch, name): getattr(torch.ops.aten, name).data for name in _NAMES
}
"""Maps the functions that layers of torch.nn call to the ops for packed sequences."""

_SIZES_AT = 1
"""The position of the tensor of batch sizes in the arguments of `PACKED`'s ops."""


def onednn_has_bf16() -> bool:
    """Whether oneDNN, which runs layers of an LSTM as one kernel each, has bf16 here.

    Its answer is for this machine and for `torch.backends.mkldnn.enabled`.
    """
    mkldnn = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_packed(args: Sequence[Any]) -> bool:
    """Whether these are the arguments of a layer on a packed sequence."""
    sizes = args[_SIZES_AT] if len(args) > _SIZES_AT else None
    return isinstance(sizes, torch.Tensor) and sizes.dtype == torch.int64


def packed_result(
    data: torch.Tensor,
    _batch_sizes: torch.Tensor,
    hx: _States,
    params: Sequence[torch.Tensor],
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    """A layer's results for packed fake tensors: one state per row, and the last."""
    *_, bidirectional = options
    states = _all(hx)
    output = states[0].new_zeros(data.shape[0], _width(states, bidirectional))
    return _with_history([output, *map(torch.zeros_like, states)], data, params)


def sequence_result(
    data: torch.Tensor,
    hx: _States,
    params: Sequence[torch.Tensor],
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    """A layer's results for padded fake tensors: one state per step, and the last.

    Raises:
        RuntimeError: the operands have several dtypes, which no kernel takes.
    """
    *_, bidirectional, batch_first = options
    states = _all(hx)
    dtypes = {each.dtype for each in (data, *states, *params)}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(data.device.type):
        message = f"a recurrent layer of tensors of {sorted(map(str, dtypes))}"
        raise RuntimeError(message)
    steps, batch = (data.shape[1], data.shape[0]) if batch_first else data.shape[:2]
    output = states[0].new_zeros(steps, batch, _width(states, bidirectional))
    if batch_first:
        output = output.transpose(0, 1)
    return _with_history([output, *map(torch.zeros_like, states)], data, params)


def _all(hx: _States) -> list[torch.Tensor]:
    return [hx] if isinstance(hx, torch.Tensor) else list(hx)


def _width(states: Sequence[torch.Tensor], bidirectional: bool) -> int:
    return int(states[0].shape[-1]) * (2 if bidirectional else 1)


def _with_history(
    made: Sequence[torch.Tensor], data: torch.Tensor, params: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """`made`, as if computed from the rest: later code may ask for a gradient."""
    flows = sum((p.sum() for p in params), data.sum())
    return tuple(each + flows.to(each.dtype) for each in made)


_RESULTS: dict[OpOverload, Callable[..., Any]] = {
    **dict.fromkeys(PACKED.values(), packed_result),
    **{getattr(torch.ops.aten, name).input: sequence_result for name in _NAMES},
}


@contextlib.contextmanager
def recurrent_results() -> Iterator[None]:
    """A region where fake tensors pass through recurrent layers without their steps.

    The region changes torch's ops for all threads, so it is for Dynamo's compilations,
    around each of which Dynamo holds its lock.
    """
    keys = (
        torch._C.DispatchKey.CompositeImplicitAutograd,
        torch._C.DispatchKey.Autograd,
    )
    before = [dict(op.py_kernels) for op in _RESULTS]
    caches = [op._dispatch_cache for op in _RESULTS]
    try:
        for (op, result), cache in zip(_RESULTS.items(), caches, strict=True):
            op.py_kernels.update(dict.fromkeys(keys, result))
            cache.clear()
        yield
    finally:
        for op, cache, known in zip(_RESULTS, caches, before, strict=True):
            op.py_kernels.clear()
            op.py_kernels.update(known)
            cache.clear()
