"""The user's own compilations, in which converted models are met.

Each function is asked while Dynamo traces, and its answer is a constant of what Dynamo
makes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from autoamp import compat
from autoamp.model.compile_backend import is_ours
from autoamp.model.thread import THREAD

logger = logging.getLogger(__name__)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traced_for_us() -> bool:
    """Asked while Dynamo traces: is it for a converted model, or for the user?

    The answer is a constant of the code compiled: what we compile is called by us only.
    """
    return THREAD.inside > 0 or THREAD.off > 0


USERS_BACKENDS: list[Callable[..., Any]] = []
"""Those of compilations of the user's own in which a converted model was met."""


ONE_GRAPH, OURS = -1, -2
"""In place of a backend: the graph must not be broken; our pass precedes it anyway."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def users_backend() -> int:
    """Asked while Dynamo traces for the user: the place of the backend."""
    backend, may_break = compat.tracing_backend()
    if is_ours(compat.unwrapped_backend(backend)):
        return OURS
    if backend is None or not may_break:
        logger.warning(
            "autoamp: a converted model is called in a compilation with "
            "fullgraph=True, and torch.autocast stands in for its rewritten graphs; "
            'give up fullgraph, or use torch.compile(..., backend="autoamp")'
        )
        return ONE_GRAPH
    for place, known in enumerate(USERS_BACKENDS):
        if known is backend:
            return place
    USERS_BACKENDS.append(backend)
    return len(USERS_BACKENDS) - 1
