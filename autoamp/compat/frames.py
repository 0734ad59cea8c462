"""Frames that Dynamo compiles: its messages, and why it leaves one to Python."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch._dynamo
import torch._dynamo.convert_frame
import torch._dynamo.exc
import torch._dynamo.types
from torch import nn
from torch._dynamo.utils import counters

from autoamp.compat.traced_calls import is_traced, traced_callers
from autoamp.messages import printable_line

ConvertFrameReturn: Any = torch._dynamo.types.ConvertFrameReturn
"""Made without arguments, it has Dynamo leave a frame, now and later, to Python."""


class Left(NamedTuple):
    """Code that Dynamo leaves to Python."""

    code: types.CodeType
    at_limit: bool = False  # only for calls that need graphs beyond the recompile limit
    is_said: bool = True  # the reason is one that users should read
    error: str = ""  # the error that Dynamo failed with, in a line
    changes: str = ""  # the value the code changes, so that its own graphs are useless
    is_empty: bool = False  # Dynamo followed it to its end and met no tensor op
    is_broken: bool = False  # at a graph break that Dynamo cannot go on from
    broke_at: str = ""  # Dynamo's words for the last graph break

    @property
    def is_sparse(self) -> bool:
        """Whether Dynamo met a sparse tensor, of which it captures nothing."""
        return "sparse tensor" in self.broke_at.lower()


def first_argument(frame: types.FrameType) -> Any:
    """What a function that Python's stack shows was first called with, or None."""
    code = frame.f_code
    if not code.co_argcount:
        return None
    held = frame.f_locals
    found = held.get(code.co_varnames[0])
    # Before Python 3.13 the locals that were read live as long as their frame: the
    # optimizer that a training loop has deleted would.  A debugger may be using them.
    copied = type(held) is dict and code.co_flags & inspect.CO_OPTIMIZED
    if copied and sys.gettrace() is None:
        held.clear()
    return found


def callers(most: int) -> Iterator[tuple[types.CodeType, Any]]:
    """The functions that Python's stack shows, each with its first argument.

    The innermost of `most` frames comes first; a function without arguments is none.
    Functions that Dynamo traces, which are on no stack, come before all.
    """
    yield from traced_callers()
    frame: types.FrameType | None = sys._getframe(1)
    # Between a traced function and its caller stand dozens of Dynamo's own frames.
    passed = "torch._dynamo" if is_traced() else ()
    while frame is not None and most > 0:
        if not frame.f_globals.get("__name__", "").startswith(passed):
            most -= 1
            if frame.f_code.co_argcount:
                yield frame.f_code, first_argument(frame)
        frame = frame.f_back


def said_in_a_line(error: BaseException) -> str:
    """The class of an error and the first line it says."""
    (line, *_) = [*str(error).strip().splitlines(), ""]
    return printable_line(f"{type(error).__name__}: {line}")


def methods_modules(frame: Any) -> list[nn.Module]:
    """The module whose method runs in a frame, where there is one; at most two."""
    names = {*frame.f_code.co_varnames[:1], "self"}  # the code after a break has `self`
    found = (frame.f_locals.get(name) for name in sorted(names))
    return [value for value in found if isinstance(value, nn.Module)]


def module_of(frame: Any) -> set[int]:
    """The `id` of the module whose method runs in a frame, where there is one."""
    return {id(module) for module in methods_modules(frame)}


# Dynamo's words for why it left a frame; torch 2.11 gives none.
_SOFT_ERROR = "an error was suppressed during compilation"
_NO_OPS = "No ops traced for the FX graph"
_NO_TENSOR = "no tensor-related objects"  # Dynamo passes over such a frame at no cost


def has_no_ops(found: Any) -> bool:
    """Whether Dynamo followed a frame to its end and met no tensor op."""
    return _NO_OPS in (getattr(found, "skip_reason", None) or "")


def may_be_left(error: Exception) -> bool:
    """Whether a frame in which Dynamo failed may run as Python from its first line."""
    return not isinstance(error, torch._dynamo.exc.ResumePrologueTracingError)


class Since:
    """What Dynamo's counters say of the frame it has looked at since this was made."""

    def __init__(self) -> None:
        self._seen, self._failed, self._breaks = _counted()

    def was_traced(self, found: Any) -> bool:
        """Whether Dynamo, which gives `found`, traced the frame, to a graph or not."""
        if found.guarded_code is not None:
            return True
        reason = getattr(found, "skip_reason", None) or ""
        return _counted()[0] > self._seen and not reason.startswith(_NO_TENSOR)

    def broke_off(self, frame: Any, found: Any) -> bool:
        """Whether Dynamo left a module's frame at a break that it cannot go on from."""
        return bool(module_of(frame)) and self.failed(found)

    def failed(self, found: Any) -> bool:
        """Whether Dynamo gave up the frame, at a break that it cannot go on from."""
        if hasattr(found, "skip_reason"):
            return bool(found.skip_reason == _SOFT_ERROR)
        return _counted()[1] > self._failed  # torch 2.11

    @property
    def broke_at(self) -> str:
        """The first line of the reason for the last graph break; "" where none was."""
        before, now = self._breaks, _counted()[2]
        new = [why for why, times in now.items() if times > before.get(why, 0)]
        return printable_line(new[-1].strip().partition("\n")[0]) if new else ""


def _counted() -> tuple[int, int, dict[str, int]]:
    """How many frames Dynamo has begun, and failed on; graph breaks by their reason."""
    frames, breaks = counters["frames"], dict(counters.get("graph_break") or {})
    return frames["total"], frames["total"] - frames["ok"], breaks


def entries_of(code: types.CodeType) -> list[Any]:
    """The compiled versions of `code`, of every backend."""
    ask: Any = torch._dynamo.eval_frame._debug_get_cache_entry_list
    return list(ask(code))


def set_frames_action(code: types.CodeType, own: str, called: str) -> None:
    """Sets how Dynamo treats `code` and frames it calls: "DEFAULT" or "SKIP"."""
    _EVAL_FRAME.set_code_exec_strategy(code, frames_strategy(own, called))


def frames_strategy(own: str, called: str) -> Any:
    """An answer to Dynamo on a frame and on frames it calls."""
    actions = _EVAL_FRAME._FrameAction
    return _EVAL_FRAME._FrameExecStrategy(
        getattr(actions, own), getattr(actions, called)
    )


_EVAL_FRAME: Any = torch._C._dynamo.eval_frame


def never_a_graph_by_itself(function: Any) -> None:
    """Makes Dynamo start no graph at `function`, but look at functions it calls.

    In a graph that begins above it, `function` is traced like any other.
    """
    set_frames_action(function.__code__, "SKIP", "DEFAULT")


def lock() -> Any:
    """Dynamo's lock, held while our limits stand in torch's configuration."""
    return torch._dynamo.convert_frame.compile_lock


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A region in which Dynamo's messages reach only those who asked for them."""
    with warnings.catch_warnings():
        # Advice to those who write extensions of torch: a list's own `append` is none.
        warnings.filterwarnings("ignore", r"\s*Dynamo does not know how to trace the b")
        # Dynamo looks at `.grad` of every input and hides the warning, but not from a
        # filter that makes the warning an error, and the error would end the capture.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")
        # A filter of its own: the end of a region inside, or of one in another thread,
        # leaves this region as it is.
        own = functools.partial(_is_worth_saying)
        for logger in _LOGGERS:
            logger.addFilter(own)
        try:
            yield
        finally:
            for logger in _LOGGERS:
                logger.removeFilter(own)


_LOGGERS = [
    logging.getLogger(f"torch.{name}")
    for name in (
        "_dynamo.convert_frame",
        "_dynamo.variables.tensor",
        "_guards",
        "_subclasses.fake_tensor",
        "fx.experimental.symbolic_shapes",
        "utils._sympy.interp",
    )
]

_PAGES = (
    "Graph break from `Tensor.item()`",  # advice, with a page of stack
    "WON'T CONVERT",  # three pages; the report says which code is left to Python
    "failed while attempting to run meta",  # eight pages, of an op on fake tensors
    "fake tensor raised TypeError",  # the model's own code raises the error once more
    "torch._dynamo hit config.",  # a limit on graphs, which we say ourselves
    # A guard that cannot be made ends the capture, and we say what runs instead.
    "Error while creating guard",
    "Created at:",
    "Failing guard allocated",
    "failed during evaluate_expr",
    "failed while executing",
)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Whether a message of Dynamo is for a user who did not ask for messages."""
    if logging.getLogger(record.name).isEnabledFor(logging.INFO):
        return True  # asked for, by TORCH_LOGS
    return not any(page in str(record.msg) for page in _PAGES)


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
