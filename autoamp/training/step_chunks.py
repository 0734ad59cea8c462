"""Steps parameters whose masters are split, chunk by chunk.

An optimizer of the same class, settings and state has the parameters of one chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from autoamp import compat
from autoamp.training.elementwise_optimizers import part_of
from autoamp.training.exchange import Exchange
from autoamp.training.split import Chunk, in_order


def step_chunk(optimizer: Optimizer, chunk: Chunk, body: Callable[..., Any]) -> None:
    """Steps one chunk, whose parameters are their masters meanwhile.

    Args:
        body: the step of the optimizer's class, without torch's hooks.
    """
    chunk.open()
    part = part_of(optimizer, {id(p): p for p in chunk.params}, optimizer.state)
    try:
        opened = Exchange(zip(chunk.params, chunk.masters, strict=True))
        try:
            body(part)
        finally:
            opened.end(rounds=False)
    finally:
        chunk.close()


def step_cut(optimizer: Optimizer, chunk: Chunk, body: Callable[..., Any]) -> None:
    """Steps one large weight piece by piece, as an elementwise optimizer may.

    Args:
        body: as for `step_chunk`.
    """
    (param,) = chunk.params
    state, grad = optimizer.state, param.grad
    before: dict[str, Any] = state.get(param, {})
    after = dict(before)
    assert grad is not None, "a weight without a gradient is not stepped"
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    for piece, (start, stop) in enumerate(chunk.pieces):
        chunk.open(piece)
        (master,) = chunk.masters
        master.grad = in_order(grad)[start:stop].float()
        own = {k: _cut(v, param, start, stop) for k, v in before.items()}
        states = defaultdict(dict, {master: own} if before else {})
        part = part_of(optimizer, {id(param): master}, states)
        try:
            body(part)
        finally:
            master.grad = None  # a view would hold the whole gradient
            chunk.close(piece)
            for key, value in states.get(master, {}).items():
                after[key] = _put(value, after.get(key), param, start, stop)
    if after:
        state[param] = after
    torch.autograd.graph.increment_version(param)


def _cut(value: Any, param: torch.Tensor, start: int, stop: int) -> Any:
    """The elements of a piece of a weight in one entry of the weight's state."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != param.shape:  # the number of steps, which each piece counts
        return value.clone()
    if value.stride() != param.stride():
        value = torch.empty_like(param, dtype=value.dtype).copy_(value)
    return in_order(value)[start:stop]


def _put(value: Any, whole: Any, param: torch.Tensor, start: int, stop: int) -> Any:
    """An entry of a weight's state, with the elements of a piece as in `value`."""
    if not isinstance(value, torch.Tensor) or value.shape != (stop - start,):
        return value
    if not isinstance(whole, torch.Tensor) or whole.stride() != param.stride():
        old = whole
        whole = torch.zeros_like(param, dtype=value.dtype)
        if isinstance(old, torch.Tensor):
            whole.copy_(old)
    kept = in_order(whole)[start:stop]
    if compat.data_address(kept) != compat.data_address(value):
        kept.copy_(value)
    return whole
