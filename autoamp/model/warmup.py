"""Captures a model before its first real call, and leaves no trace on the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.model.kept import Kept


def capture_now(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    weights: bool = False,
) -> None:
    """Calls `model` once; the model and the random state stay as they were.

    A model in training mode is captured with gradients, a model in eval mode without.
    Inside `torch.inference_mode()` a model is captured for calls in that mode, which
    have graphs of their own.

    Args:
        weights: as for `left_as_it_is`.
    """
    with left_as_it_is(model, weights=weights), torch.set_grad_enabled(model.training):
        model(*args, **(kwargs or {}))


@contextlib.contextmanager
def left_as_it_is(model: nn.Module, *, weights: bool = False) -> Iterator[None]:
    """A region after which `model` and the random generators are as they were.

    Every attribute of every module, and every list, dict, tensor or other object that
    an attribute leads to, is the same object with the same contents, after an error
    too.

    Args:
        weights: parameters are put back too, which takes their memory again.
    """
    kept, drawn = Kept(model, weights=weights), compat.Generators()
    try:
        yield
    finally:
        drawn.restore()
        kept.restore()
