"""The compiled entry of a model: Dynamo's, with limits and chances of its own."""

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

from autoamp.compat.layers import layer_captured, layer_left
from autoamp.compat.recurrent import recurrent_results

_COMPILE_TIME_CONFIG = {
    # Without it nn.LSTM, GRU and RNN give no graph at all, silently.
    "allow_rnn": True,
    # DDPOptimizer would call the backend once per bucket with fake tensors; the eager
    # back end has per-op autograd, so DDP overlaps without any splitting.
    "optimize_ddp": False,
}

_SUPPRESSED = "an error was suppressed during compilation"

_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


class Backend(Protocol):
    """What a graph is handed to.

    Attributes:
        runs_as_is: no compiler is handed the graph in turn.
    """

    @property
    def runs_as_is(self) -> bool: ...

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any], /) -> Any: ...


class CompiledEntry:
    """A function compiled by Dynamo with `backend`, and recompile limits of its own.

    Dynamo counts recompiles per code object, shared by every function of one source:
    two dozen models converted through the same lambda would exhaust the limit of 8 and
    then run fp32 without a word.  The entry gets a fresh code object; of code that
    models share, a submodule's after a graph break, what others have compiled is not
    counted.  (`isolate_recompiles` of torch 2.13 would count so too, but it is one
    number for all threads: models called in two at once recompile without end.)
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
            leave: told of methods of modules that are left to Python.
            hooked: modules may get hooks, and lose them.  Dynamo guards against that
                slowly, with several guards for each module.
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
        """Whether Dynamo has anything for it: `torch._dynamo.reset()` drops all."""
        if not _can_list_entries():
            return bool(self._captured)
        return any(map(_entries, self._captured))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The call, compiled; where it raises, Dynamo is to look at its code again.

        A frame that raises while it is traced (`if x.isnan().any(): raise`, and bad
        arguments) is one that Dynamo would leave to Python from then on, good arguments
        or not.
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
    for it and torch's configuration is what the user set everywhere else.  (The class
    of this one object is replaced: the C side walks the object's own attributes, and a
    wrapping object crashes it.)

    Args:
        captured: what has graphs from now on is added.
        skipped: what is left to Python from now on is added.
        leave: called with those of it that are methods of modules, after a graph break
            that Dynamo could not go on from; and, with true, where the recompile limit
            leaves some calls of it to Python.
        entry: what the calls of the model begin with.
        hooked: as of a `CompiledEntry`.
    """
    ours = {**_COMPILE_TIME_CONFIG, "skip_nnmodule_hook_guards": not hooked}
    base = type(callback)
    exceeded: dict[types.CodeType, Any] = {}
    modules: defaultdict[types.CodeType, set[int]] = defaultdict(set)
    raced: Counter[types.CodeType] = Counter()

    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        seen = len(_entries(frame.f_code))
        with _lock():
            raced[frame.f_code] += len(_entries(frame.f_code)) > seen
            return call_alone(self, frame, *args, **kwargs)

    def call_alone(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        code, known = frame.f_code, modules[frame.f_code]
        before = len(known)
        known.update(_module_of(frame))
        if code in exceeded and len(known) == before:
            return exceeded[code]
        # What does not count: graphs of others; one for each more of the blocks of a
        # model, of other sizes each, that share one code object after a graph break;
        # and one for each thread that waited here while another made the same graph.
        others = sum(entry.backend is not backend for entry in _entries(code))
        more = others + max(len(known) - 1, 0) + raced[code]
        config = torch._dynamo.config
        limits = {name: getattr(config, name) + more for name in _LIMITS}
        recurrent = recurrent_results() if backend.runs_as_is else nullcontext()
        failed = _failed_frames()
        with config.patch({**ours, **limits}), recurrent, _quietly():
            found = base.__call__(self, frame, *args, **kwargs)
            if layer_left(frame, found):
                found = layer_captured(self, frame, *args, **kwargs) or found
        if found.guarded_code is not None and code not in captured:
            captured.append(code)
        if found.guarded_code is None and found.apply_to_code:
            if found.frame_exec_strategy.cur_action.name == "RUN_ONLY":
                found.apply_to_code = False  # our limit is not theirs
                exceeded[code] = found
                if code is not entry:  # whose calls then run no graph: they are counted
                    leave(code, True)
            else:
                skipped.append(code)
                if _module_of(frame) and _suppressed(found, failed):
                    leave(code, False)
        return found

    callback.__class__ = type(base.__name__, (base,), {"__call__": call})


def _module_of(frame: Any) -> set[int]:
    """The `id` of the module whose method runs in a frame, where there is one."""
    names = (*frame.f_code.co_varnames[:1], "self")  # the code after a break has `self`
    found = (frame.f_locals.get(name) for name in names)
    return {id(value) for value in found if isinstance(value, nn.Module)}


def _suppressed(found: Any, failed: int) -> bool:
    """Whether Dynamo made nothing of a frame because of an error that it kept quiet.

    Args:
        failed: on how many frames it had failed before.
    """
    if hasattr(found, "skip_reason"):
        return bool(found.skip_reason == _SUPPRESSED)
    return _failed_frames() > failed  # an older torch gives no reason


def _failed_frames() -> int:
    """On how many frames Dynamo has failed so far, those being traced now included."""
    counters: Any = getattr(torch._dynamo.utils, "counters", None)
    if counters is None:
        return 0
    frames = counters["frames"]
    return int(frames["total"] - frames["ok"])


def _lock() -> Any:
    """Dynamo's own: our limits stand in torch's configuration while it compiles.

    Where Dynamo shows none, ours keeps converted models apart from each other, though
    not from what the user compiles in another thread.
    """
    return getattr(torch._dynamo.convert_frame, "compile_lock", _OUR_LOCK)


_OUR_LOCK = threading.RLock()


def _entries(code: types.CodeType) -> list[Any]:
    """What `code` was compiled to, with whichever backend."""
    if not _can_list_entries():  # models of one class then share a limit
        return []
    ask: Any = torch._dynamo.eval_frame._debug_get_cache_entry_list
    return list(ask(code))


def _can_list_entries() -> bool:
    return hasattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list")


def set_frames_action(code: types.CodeType, own: str, called: str) -> None:
    """What becomes of frames of `code`, and of those they call: "DEFAULT" or "SKIP"."""
    try:
        frames: Any = torch._C._dynamo.eval_frame
        actions = [getattr(frames._FrameAction, name) for name in (own, called)]
        strategy = frames._FrameExecStrategy(*actions)
        frames.set_code_exec_strategy(code, strategy)
    except AttributeError:  # an older torch: it captures a little more, or less
        pass


def never_a_graph_by_itself(function: Any) -> None:
    """Makes Dynamo start no graph at `function`, but look at what it calls.

    In a graph that is begun above it, it is traced like any other.
    """
    set_frames_action(function.__code__, "SKIP", "DEFAULT")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keeps from the user what Dynamo says to people who asked for it."""
    with warnings.catch_warnings():
        # Dynamo looks at `.grad` of every input.  It hides the warning, but not from a
        # filter that makes it an error, and the error would end the capture.
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
    """Not how to avoid a graph break at `.item()`, with a page of stack.

    Nor what Dynamo failed on, with three: the report says what is left to Python, and
    an error of the model's own is raised by its own code.
    """
    if logging.getLogger(record.name).isEnabledFor(logging.INFO):
        return True  # asked for, by TORCH_LOGS
    said = str(record.msg)
    return not ("Graph break from `Tensor.item()`" in said or "WON'T CONVERT" in said)
