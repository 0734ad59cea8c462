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
        as_written: whether no part of that call is captured.
    """

    off = 0
    engine: Engine | None = None
    as_written = False


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


def inside_captured_code(*, is_off: bool) -> bool:
    """Whether what is called now is part of a converted model's call as a whole.

    Where Dynamo is switched off in a captured call (in a checkpoint around a graph
    break, or by `torch.compiler.disable`), what is called there is called by itself.
    A backward calls what was checkpointed again, and not in the model's call.

    Args:
        is_off: whether Dynamo is switched off.
    """
    return THREAD.engine is not None and (THREAD.as_written or not is_off)


def tell_ranks(model: nn.Module, scaling: ModelScaling) -> None:
    """Tells ranks of a call: which code reduces gradients, which weights are shards.

    Ranks count the calls of a model, so that every call counts, whatever it runs.
    """
    scaling.ledger.note_call()
    if compat.uses_fsdp():
        SHARDED.note_call(model, inside_a_call)
