"""How to treat a converted model that is called in a compilation of the user's own.

Each function is called while Dynamo traces, and its answer is a constant of the code
that Dynamo makes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from autoamp import compat
from autoamp.capture.thread import THREAD, inside_a_call
from autoamp.model.compile_backend import is_ours
from autoamp.training.uncalled import expect_no_calls

logger = logging.getLogger(__name__)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traced_for_us() -> bool:
    """Whether Dynamo traces for a converted model now, and not for the user.

    True under `torch._dynamo.explain` too, with which users ask about the model's own
    code.  The answer can be a constant, because only we call the code that we compile.
    """
    return inside_a_call() or THREAD.off > 0 or compat.is_asked_by_dynamo()


USERS_BACKENDS: list[Callable[..., Any]] = []
"""The backends of the user's own compilations in which a converted model was met."""


ONE_GRAPH, RUNS_OUR_PASS = -1, -2
"""Answers in place of a position in `USERS_BACKENDS`.

`ONE_GRAPH`: the graph must not be broken.  `RUNS_OUR_PASS`: the backend runs our pass
anyway.
"""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def users_backend() -> int:
    """The position in `USERS_BACKENDS` of the backend that Dynamo traces for now.

    The answer may also be `ONE_GRAPH` or `RUNS_OUR_PASS`.
    """
    backend, may_break = compat.tracing_backend()
    backend = compat.without_buckets(backend)
    if is_ours(compat.unwrapped_backend(backend)):
        expect_no_calls()
        return RUNS_OUR_PASS
    if backend is None or not may_break:
        expect_no_calls()
        logger.warning(
            "autoamp: a converted model is called in a compilation with "
            "fullgraph=True, and torch.autocast stands in for its rewritten graphs; "
            'drop fullgraph=True, or use torch.compile(..., backend="autoamp")'
        )
        return ONE_GRAPH
    for index, known in enumerate(USERS_BACKENDS):
        if known is backend:
            return index
    USERS_BACKENDS.append(backend)
    return len(USERS_BACKENDS) - 1
