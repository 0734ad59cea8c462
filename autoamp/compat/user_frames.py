"""Frames of compilations that the user begins, and our backend takes part in.

Dynamo asks a backend about graphs alone.  A frame that Dynamo leaves to Python gives
none, so that the backend would never hear of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch.utils import _pytree as pytree

from autoamp.compat.backends import hides_calls
from autoamp.compat.frames import ConvertFrameReturn, Left, Since, lock
from autoamp.compat.layers import PACKED, layer_captured, layer_left, recurrent_results
from autoamp.compat.modes import any_autocast


class Hears(Protocol):
    """A backend that is told of the frames left to Python."""

    frames_left: weakref.WeakKeyDictionary[Any, Any]

    def tell_of_left(self, left: Left) -> None:
        """Says that code was left to Python, or raises."""


def watch_frames(hearing: Callable[[Any], Hears | None]) -> None:
    """Has Dynamo compile the frames of some backends under our settings, and tell them.

    Dynamo's code for all other backends stays as it is.  Only the first call counts.

    Args:
        hearing: gives the backend to tell, for one that Dynamo compiles with, or None.
    """
    base: Any = CatchErrorsWrapper.__call__
    if base.__module__ == __name__:
        return

    def call(self: Any, frame: Any, *args: Any) -> Any:
        told = hearing(self)
        if told is None:
            return base(self, frame, *args)
        with lock():
            return _compiled(base, self, told, frame, *args)

    CatchErrorsWrapper.__call__ = call  # type: ignore[method-assign, assignment]


def _compiled(base: Any, callback: Any, told: Hears, frame: Any, *args: Any) -> Any:
    """Dynamo's result for a frame of a backend that is told."""
    code = frame.f_code
    if code in told.frames_left:
        return told.frames_left[code]
    since = Since()
    # Without this Dynamo leaves each function that calls an nn.LSTM, GRU or RNN.
    try:
        with torch._dynamo.config.patch(allow_rnn=True), recurrent_results():
            found = base(callback, frame, *args)
            if layer_left(frame, found):
                found = layer_captured(callback, frame, *args) or found
    except torch._dynamo.exc.TorchRuntimeError:
        # Torch 2.11 fails to pad what a recurrent layer gives for a packed sequence.
        found = ConvertFrameReturn()
        if hasattr(found, "skip_reason"):  # a later torch
            raise
    at_limit = found.frame_exec_strategy.cur_action.name == "RUN_ONLY"
    broke = since.failed(found)
    hidden = hides_calls() and not torch._dynamo.trace_rules.check(code)
    if found.guarded_code is not None or not (at_limit or broke or hidden):
        return found
    if any_autocast() or not _computes(frame):
        return found
    told.tell_of_left(Left(code, at_limit, is_broken=broke, broke_at=since.broke_at))
    if broke:
        told.frames_left[code] = found
    # Else Dynamo would pass over the code for all backends and later calls, and tell of
    # none.
    found.apply_to_code = False
    return found


def _computes(frame: Any) -> bool:
    """Whether a function is given a float tensor, or a module that has one."""
    cells = [getattr(c, "cell_contents", None) for c in getattr(frame, "closure", ())]
    return any(
        (isinstance(each, Tensor) and each.is_floating_point())
        or (isinstance(each, nn.Module) and any(True for _ in each.parameters()))
        for each in pytree.tree_leaves([dict(frame.f_locals), cells])
    )


def is_recurrent(gm: fx.GraphModule) -> bool:
    """Whether a graph that Dynamo captured calls an LSTM, a GRU or an RNN."""
    return any(
        isinstance(each, fx.GraphModule)
        and any(node.target in PACKED for node in each.graph.nodes)
        for each in gm.modules()
    )
