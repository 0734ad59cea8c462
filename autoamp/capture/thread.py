"""Calls of converted models: which this thread is in, and which ranks must know of."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import nn

from autoamp import compat
from autoamp.capture.engine import Engine
from autoamp.training.model_scaling import ModelScaling
from autoamp.weights.shards import SHARDED

under_compilation = torch.compiler.is_dynamo_compiling


class _ThisThread(threading.local):
    """What this thread is in.

    Attributes:
        off: the depth of `disabled()` regions.
        engine: the engine of the converted model whose call the thread is in.
    """

    off = 0
    engine: Engine | None = None


THREAD = _ThisThread()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """A region in which converted models called from this thread run in fp32."""
    THREAD.off += 1
    try:
        yield
    finally:
        THREAD.off -= 1


def inside_a_call() -> bool:
    """Whether this thread is in a call of a converted model."""
    return THREAD.engine is not None


def inside_captured_code() -> bool:
    """Whether the call of a converted model that this thread is in captures its code.

    It captures nothing of what a checkpoint around a graph break calls.  The backward
    calls that again, outside of any call: it must be captured both times, or never.
    """
    return THREAD.engine is not None and not compat.is_in_checkpoint()


def tell_ranks(model: nn.Module, scaling: ModelScaling) -> None:
    """Tells ranks of a call: which code reduces gradients, which weights are shards.

    Ranks count the calls of a model, so that every call counts, whatever it runs.
    """
    scaling.ledger.note_call()
    if compat.uses_fsdp():
        SHARDED.note_call(model, inside_a_call)
