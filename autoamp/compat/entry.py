"""The entry of a model, compiled by Dynamo with recompile limits of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch._dynamo
import torch._dynamo.convert_frame
from torch import fx, nn

from autoamp.compat.distributed.ddp import note_ddp_mode
from autoamp.compat.layers import layer_captured, layer_left
from autoamp.compat.recurrent import recurrent_results

# DDPOptimizer would cut a graph before our pass sees it: see `in_buckets`.
_COMPILE_TIME_CONFIG = {"optimize_ddp": False}

_SUPPRESSED = "an error was suppressed during compilation"

_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


class Backend(Protocol):
    """The Dynamo backend that gets each graph.

    Attributes:
        runs_as_is: graphs run as they are, and no compiler gets them.
    """

    @property
    def runs_as_is(self) -> bool: ...

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any], /) -> Any: ...


class CompiledEntry:
    """A function compiled by Dynamo with `backend`, and recompile limits of its own.

    Dynamo counts recompiles per code object, shared by every function of one source:
    two dozen models converted through the same lambda would exhaust the limit of 8 and
    then run in fp32 without a message.  Therefore the entry gets a fresh code object.
    In code that models share (a submodule's, after a graph break) graphs of other
    models are not counted.  (`isolate_recompiles` of torch 2.13 would count so too, but
    is one number for all threads: models called in two at once recompile without end.)
    """

    def __init__(
        self,
        entry: types.FunctionType,
        backend: Backend,
        leave: Callable[[types.CodeType, bool], None],
        *,
        hooked: bool,
    ) -> None:
        """Compiles nothing yet.

        Args:
            leave: called with methods of modules that Dynamo leaves to Python.
            hooked: modules may get and lose hooks, which Dynamo guards slowly, with
                several guards for each module.
        """
        fresh = types.FunctionType(
            entry.__code__.replace(co_name=entry.__code__.co_name),
            entry.__globals__,
            entry.__name__,
            entry.__defaults__,
            entry.__closure__,
        )
        self._captured: list[types.CodeType] = []
        self._skipped: list[types.CodeType] = []
        context: Any = torch._dynamo.optimize(backend=backend)
        if hasattr(context, "callback"):  # absent where TORCHDYNAMO_DISABLE is set
            _configure_while_compiling(
                context.callback,
                backend,
                self._captured,
                self._skipped,
                leave,
                fresh.__code__,
                hooked=hooked,
            )
        self._compiled: Callable[..., Any] = context(fresh)

    @property
    def is_captured(self) -> bool:
        """Whether Dynamo has graphs of the entry: `torch._dynamo.reset()` drops all."""
        if not _can_list_entries():
            return bool(self._captured)
        return any(map(_entries, self._captured))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled entry; after an error Dynamo looks at its code again.

        Dynamo would leave a frame that raises while it is traced
        (`if x.isnan().any(): raise`, and bad arguments) to Python from then on, even
        with good arguments.
        """
        before = len(self._skipped)
        try:
            return self._compiled(*args, **kwargs)
        except Exception:
            for code in self._skipped[before:]:
                set_frames_action(code, "DEFAULT", "DEFAULT")
            del self._skipped[before:]
            raise


def _configure_while_compiling(  # noqa: PLR0917
    callback: Any,
    backend: Backend,
    captured: list[types.CodeType],
    skipped: list[types.CodeType],
    leave: Callable[[types.CodeType, bool], None],
    entry: types.CodeType,
    *,
    hooked: bool,
) -> None:
    """Makes Dynamo's frame callback run under our configuration.

    The callback runs only when a frame is compiled, so a converted call pays nothing
    for the callback, and everywhere else torch's configuration is the user's.  (The
    class of this one object is replaced, because the C side walks the object's own
    attributes and crashes on a wrapping object.)

    Args:
        captured: gets the code that has graphs from now on.
        skipped: gets the code that is left to Python from now on.
        leave: called with a method of a module and False, after a graph break that
            Dynamo could not go on from; called with code and True, where the recompile
            limit leaves some calls of the code to Python.
        entry: the code that calls of the model begin with.
        hooked: as for `CompiledEntry`.
    """
    ours = {**_COMPILE_TIME_CONFIG, "skip_nnmodule_hook_guards": not hooked}
    base = type(callback)
    exceeded: dict[types.CodeType, Any] = {}
    modules: defaultdict[types.CodeType, set[int]] = defaultdict(set)
    raced: Counter[types.CodeType] = Counter()

    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        entries = len(_entries(frame.f_code))
        with _lock():
            raced[frame.f_code] += len(_entries(frame.f_code)) > entries
            return call_alone(self, frame, *args, **kwargs)

    def call_alone(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        code, known = frame.f_code, modules[frame.f_code]
        before = len(known)
        known.update(_module_of(frame))
        if code in exceeded and len(known) == before:
            return exceeded[code]
        # Some graphs do not count: graphs of other backends; one for each further block
        # of a model, where blocks of several sizes share one code object after a graph
        # break; one for each thread that waited while another made the same graph.
        others = sum(entry.backend is not backend for entry in _entries(code))
        more = others + max(len(known) - 1, 0) + raced[code]
        note_ddp_mode(torch._dynamo.config.optimize_ddp)
        as_is = backend.runs_as_is
        recurrent = recurrent_results() if as_is else nullcontext()
        failed = _failed_frames()
        # Without `allow_rnn` nn.LSTM, GRU and RNN give no graph.  A compiler would take
        # their steps apart, and what inductor makes of an LSTM raises (torch 2.13).
        options = {**ours, **_limits(more), "allow_rnn": as_is}
        with torch._dynamo.config.patch(options), recurrent, _quietly():
            found = base.__call__(self, frame, *args, **kwargs)
            if layer_left(frame, found):
                found = layer_captured(self, frame, *args, **kwargs) or found
        if found.guarded_code is not None and code not in captured:
            captured.append(code)
        if found.guarded_code is None and found.apply_to_code:
            if found.frame_exec_strategy.cur_action.name == "RUN_ONLY":
                found.apply_to_code = False  # our limit is not other models'
                exceeded[code] = found
                if code is not entry:  # the entry's calls without a graph are counted
                    leave(code, True)
            else:
                skipped.append(code)
                if _module_of(frame) and _suppressed(found, failed):
                    leave(code, False)
        return found

    callback.__class__ = type(base.__name__, (base,), {"__call__": call})


def _limits(more: int) -> dict[str, int]:
    return {name: getattr(torch._dynamo.config, name) + more for name in _LIMITS}


def _module_of(frame: Any) -> set[int]:
    """The `id` of the module whose method runs in a frame, where there is one."""
    names = (*frame.f_code.co_varnames[:1], "self")  # the code after a break has `self`
    found = (frame.f_locals.get(name) for name in names)
    return {id(value) for value in found if isinstance(value, nn.Module)}


def _suppressed(found: Any, failed: int) -> bool:
    """Whether Dynamo left a frame to Python because of an error that it suppressed.

    Args:
        failed: how many frames Dynamo had failed on before.
    """
    if hasattr(found, "skip_reason"):
        return bool(found.skip_reason == _SUPPRESSED)
    return _failed_frames() > failed  # an older torch gives no reason


def _failed_frames() -> int:
    """How many frames Dynamo has failed on so far, frames being traced now included."""
    counters: Any = getattr(torch._dynamo.utils, "counters", None)
    if counters is None:
        return 0
    frames = counters["frames"]
    return int(frames["total"] - frames["ok"])


def _lock() -> Any:
    """Dynamo's lock: our limits stand in torch's configuration while Dynamo compiles.

    Where Dynamo shows no lock, ours keeps converted models apart from each other, but
    not from code the user compiles in another thread.
    """
    return getattr(torch._dynamo.convert_frame, "compile_lock", _OUR_LOCK)


_OUR_LOCK = threading.RLock()


def _entries(code: types.CodeType) -> list[Any]:
    """The compiled versions of `code`, of every backend."""
    if not _can_list_entries():  # models of one class then share a limit
        return []
    ask: Any = torch._dynamo.eval_frame._debug_get_cache_entry_list
    return list(ask(code))


def _can_list_entries() -> bool:
    return hasattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list")


def set_frames_action(code: types.CodeType, own: str, called: str) -> None:
    """Sets what Dynamo does with `code` and frames it calls: "DEFAULT" or "SKIP"."""
    try:
        frames: Any = torch._C._dynamo.eval_frame
        actions = [getattr(frames._FrameAction, name) for name in (own, called)]
        strategy = frames._FrameExecStrategy(*actions)
        frames.set_code_exec_strategy(code, strategy)
    except AttributeError:  # an older torch: it captures a little more, or less
        pass


def never_a_graph_by_itself(function: Any) -> None:
    """Makes Dynamo start no graph at `function`, but look at functions it calls.

    In a graph that begins above it, `function` is traced like any other.
    """
    set_frames_action(function.__code__, "SKIP", "DEFAULT")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A region in which Dynamo's messages reach only those who asked for them."""
    with warnings.catch_warnings():
        # Dynamo looks at `.grad` of every input and hides the warning, but not from a
        # filter that makes the warning an error, and the error would end the capture.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")
        for logger in _LOGGERS:
            logger.addFilter(_is_worth_saying)
        try:
            yield
        finally:
            for logger in _LOGGERS:
                logger.removeFilter(_is_worth_saying)


_LOGGERS = [
    logging.getLogger(f"torch._dynamo.{name}")
    for name in ("convert_frame", "variables.tensor")
]


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Whether a message of Dynamo is for a user who did not ask for messages.

    Advice against a graph break at `.item()`, with a page of stack, is not.  Neither is
    a failure of Dynamo, with three: the report says which code is left to Python, and
    an error of the model's own is raised by the model's own code.
    """
    if logging.getLogger(record.name).isEnabledFor(logging.INFO):
        return True  # asked for, by TORCH_LOGS
    said = str(record.msg)
    return not ("Graph break from `Tensor.item()`" in said or "WON'T CONVERT" in said)
