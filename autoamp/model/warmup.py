"""Captures a model before its first real call, and leaves no trace on the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autoamp import compat


def capture_now(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> None:
    """Calls `model` once; the model and the random state stay as they were.

    A model in training mode is captured with gradients, a model in eval mode without.
    Inside `torch.inference_mode()` a model is captured for calls in that mode, which
    have graphs of their own.
    """
    devices = [d for d in {p.device for p in model.parameters()} if d.type == "cuda"]
    with (
        left_as_it_is(model),
        torch.random.fork_rng(devices=devices),
        torch.set_grad_enabled(model.training),
    ):
        model(*args, **(kwargs or {}))


@contextlib.contextmanager
def left_as_it_is(model: nn.Module) -> Iterator[None]:
    """A region after which every attribute and buffer of every module is put back.

    A buffer is put back as the same object with the same values.  All is put back after
    an error too.  An object that an attribute holds is not copied: a list that the
    model appends to stays longer.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    buffers = [
        (held, dict(held)) for held in map(compat.buffers_here, model.modules()) if held
    ]
    values = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for live, before in (*attributes, *buffers):
            if live.keys() != before.keys() or any(
                live[name] is not value for name, value in before.items()
            ):
                live.clear()
                live.update(before)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
