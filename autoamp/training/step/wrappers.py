"""Shows a skipped step on the wrappers of an optimizer, for schedulers that ask them.

accelerate's scheduler, and the Trainer of transformers, ask accelerate's wrapper of an
optimizer whether the last step was skipped.  That wrapper knows of skipped steps only
where it has a GradScaler.  The optimizer inside does not know its wrapper, so a wrapper
is found on Python's stack: it is the one whose `step` is stepping the optimizer.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from autoamp.training.optimizers import innermost
from autoamp.training.step.boundary import OptimizerBoundary

_DEEPEST = 24
"""How many frames are searched for the wrappers' steps."""

_MARK, _BEHIND = "step_was_skipped", "_is_overflow"


def show(boundary: OptimizerBoundary, skipped: Any) -> None:
    """Sets `step_was_skipped` on the optimizer, and on the wrappers that have it.

    Args:
        skipped: whether the step was skipped; a tensor where only the device knows.
    """
    optimizer: Any = boundary.optimizer
    optimizer.step_was_skipped = skipped
    find(boundary)
    show_on_wrappers(boundary, skipped)


def find(boundary: OptimizerBoundary) -> bool:
    """Notes the wrappers that step the optimizer now; whether any are known."""
    found = _stepping(boundary.optimizer)
    boundary.wrappers.update(each for each in found if _shows(each))
    return bool(boundary.wrappers)


def show_on_wrappers(boundary: OptimizerBoundary, skipped: Any) -> None:
    """Sets the mark on the wrappers that were seen to step the optimizer."""
    for wrapper in boundary.wrappers:
        vars(wrapper)[_BEHIND if _is_behind(wrapper) else _MARK] = skipped


def _stepping(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The wrappers in whose `step` the optimizer is being stepped."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            return
        code = frame.f_code
        # The locals of a frame, once read, live as long as the frame does, so that
        # those of a training loop must not be read.
        if code.co_name == "step" and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            # A GradScaler that accelerate's wrapper steps by ends the search too: the
            # wrapper notes what it did.
            if not isinstance(owner, Optimizer) or innermost(owner) is not optimizer:
                return
            if owner is not optimizer:
                yield owner
        frame = frame.f_back


def _shows(wrapper: Optimizer) -> bool:
    """Whether the wrapper has a mark of skipped steps that can be set."""
    return _is_behind(wrapper) or _MARK in vars(wrapper)


def _is_behind(wrapper: Optimizer) -> bool:
    """Whether the mark is a property that reads an attribute, as accelerate's is."""
    mark = inspect.getattr_static(type(wrapper), _MARK, None)
    return isinstance(mark, property) and _BEHIND in vars(wrapper)
