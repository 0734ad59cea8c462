"""Captures a model before its first real call, and leaves no trace on the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autoamp import compat


def capture_now(model: nn.Module, example_inputs: tuple[Any, ...]) -> None:
    """Calls `model` once; buffers, gradients and the random state stay as they were.

    A model in training mode is captured with gradients, a model in eval mode without.
    Inside `torch.inference_mode()` a model is captured for calls in that mode, which
    have graphs of their own.
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
    """A region after which every buffer is put back: the tensor object and its values.

    Buffers are put back after an error too.
    """
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
