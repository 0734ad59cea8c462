"""Room on the interpreter's stack for a call that nests deeply, such as a capture."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

_SLOTS = 2**17
"""Slots of the frame that makes room, of 8 bytes each: 1 MiB that is never touched.

From 3.11 on CPython keeps frames in pieces of memory of 16 KiB; see
`_PyThreadState_PushFrame`.  A larger frame gets a piece of its own, whose size is the
next power of two.  The frame that makes room takes a little over 1 MiB of a piece of
2 MiB, and the calls below that frame have the rest.
"""


def with_room(function: Callable[..., _T], /, *args: Any) -> _T:
    """`function(*args)`, in whose calls the interpreter asks the system for no memory.

    Without room, each call at the end of a piece of 16 KiB maps a new piece, and the
    call's return gives the piece back.  Dynamo nests deeply enough to cross such an end
    thousands of times in one capture.

    Example:
        >>> with_room(max, 1, 2)
        2
    """
    return _roomy(function, args)  # type: ignore[no-any-return]


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _with_large_frame(function: Any) -> Any:
    try:
        code = function.__code__.replace(co_stacksize=_SLOTS)
    except (AttributeError, OverflowError, ValueError):  # another interpreter
        return function
    return types.FunctionType(code, function.__globals__, function.__name__)


_roomy = _with_large_frame(_call)
