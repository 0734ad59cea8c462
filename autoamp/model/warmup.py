"""Capture before the first real call, leaving no trace of it on the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autoamp import compat


def capture_now(model: nn.Module, example_inputs: tuple[Any, ...]) -> None:
    """Calls `model` once; buffers, gradients and the random state stay as they were.

    A model in training is captured with gradients, one in eval mode without; inside
    `torch.inference_mode()` for calls inside it, which have graphs of their own.
    """
    devices = [d for d in {p.device for p in model.parameters()} if d.type == "cuda"]
    with (
        _buffers_restored(model),
        torch.random.fork_rng(devices=devices),
        torch.set_grad_enabled(model.training),
    ):
        model(*example_inputs)


@contextlib.contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    """Puts back every buffer, the tensor object and its values, whatever happens."""
    kept = [
        (buffers, dict(buffers))
        for buffers in map(compat.buffers_here, model.modules())
        if buffers
    ]
    values = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for live, before in kept:
            live.clear()
            live.update(before)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
