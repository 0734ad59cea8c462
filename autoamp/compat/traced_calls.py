"""Notices calls of modules that Dynamo traces, which Python never makes."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import nn
from torch._dynamo.variables import UnspecializedNNModuleVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import CellVariable


class _Thread(threading.local):
    """What Dynamo traces the innermost function with, while a listener is told."""

    translator: Any = None


_THREAD = _Thread()

_LISTENER: list[Callable[[nn.Module], None]] = []

_PATCHES = contextlib.ExitStack()
"""Puts back what stood in Dynamo's class before there was a listener."""


def hear_traced(told: Callable[[nn.Module], None]) -> None:
    """Has `told` hear of a module before Dynamo traces a call of it.

    A `forward` that `told` puts on the module is the one that is traced.
    """
    if not _LISTENER:
        kind: Any = UnspecializedNNModuleVariable
        base = kind.call_function

        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            for hears in _LISTENER:
                outer, _THREAD.translator = _THREAD.translator, tx
                try:
                    hears(self.value)
                finally:
                    _THREAD.translator = outer
            return base(self, tx, args, kwargs)

        _PATCHES.enter_context(mock.patch.object(kind, "call_function", call_function))
    _LISTENER[:] = [told]


def end_traced() -> None:
    """Leaves Dynamo's class as it was."""
    _LISTENER.clear()
    _PATCHES.close()


def is_traced() -> bool:
    """Whether the call that is told of is one that Dynamo traces."""
    return _THREAD.translator is not None


def traced_callers() -> Iterator[tuple[types.CodeType, Any]]:
    """The functions around a traced call, innermost first, with their first arguments.

    An argument is None where no object of Python's stands for it.
    """
    translator = _THREAD.translator
    while translator is not None:
        code = translator.f_code
        if code.co_argcount:
            held: Any = translator.symbolic_locals.get(code.co_varnames[0])
            if isinstance(held, CellVariable):  # an inner function reads it as well
                with contextlib.suppress(Exception):  # the variable has no value yet
                    held = translator.output.side_effects.load_cell(held)
            held = None if held is None else held.unwrap()
            # An argument that no code has read yet must not be guarded.
            is_unread = isinstance(held, LazyVariableTracker)
            yield code, held.peek_value() if is_unread else getattr(held, "value", None)
        translator = translator.parent
