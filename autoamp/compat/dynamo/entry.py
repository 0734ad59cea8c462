"""The entry of a model, compiled by Dynamo with recompile limits of its own."""

from __future__ import annotations

import types
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from contextlib import ExitStack, nullcontext
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import fx

from autoamp.compat.capture import fx_tracing
from autoamp.compat.distributed.ddp import note_ddp_mode
from autoamp.compat.dynamo.amount import Amount
from autoamp.compat.dynamo.authored import authors_followed
from autoamp.compat.dynamo.changing import Changing
from autoamp.compat.dynamo.frames import (
    ConvertFrameReturn,
    Left,
    broke_since,
    broken_off,
    entries_of,
    failed_frames,
    frames_strategy,
    graph_breaks,
    has_no_ops,
    lock,
    may_be_left,
    module_of,
    said_in_a_line,
    seen_frames,
    set_frames_action,
    was_traced,
)
from autoamp.compat.dynamo.layers import layer_captured, layer_left
from autoamp.compat.dynamo.on_meta import fakes_on_meta
from autoamp.compat.dynamo.places import Paths, guard_place, placed, root_frame
from autoamp.compat.dynamo.quiet import quietly
from autoamp.compat.dynamo.regions import regions_begin_when_entered
from autoamp.compat.dynamo.wide_gradients import wide_gradients_hidden
from autoamp.compat.recurrent import recurrent_results

# DDPOptimizer would cut a graph before our pass sees it: see `in_buckets`.
_COMPILE_TIME_CONFIG = {"optimize_ddp": False}

# Options of Dynamo for some code only.
_WHOLE_NUMBERS = "allow_unspec_int_on_nn_module"
_NO_OPS = "allow_empty_graphs"

_FORBIDDEN = "using FX to symbolically trace"
"""A part of what Dynamo says, before anything has run, where torch.fx traces a call."""

_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


class Backend(Protocol):
    """The Dynamo backend that gets each graph.

    Attributes:
        runs_as_is: graphs run as they are, and no compiler gets them.
        nodes: how many nodes the graphs have that it has got so far.
        amount: how much is captured of the running model.
    """

    @property
    def runs_as_is(self) -> bool: ...

    @property
    def nodes(self) -> int: ...

    @property
    def amount(self) -> Amount: ...

    def stop(self) -> None:
        """Notes that no more of the running model is to be captured."""

    def dtype_in(self, modules: list[str], /) -> torch.dtype | None:
        """The dtype of autocast for what authors ask of it; None: nothing is asked."""

    def apart(self, path: str, /) -> Hashable:
        """A key of a module by its path; modules with unequal keys share no graphs.

        The key is None for a module that options do not name.
        """

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
        *,
        hooked: bool,
        strict: bool,
    ) -> None:
        """Compiles nothing yet.

        Args:
            hooked: modules may get and lose hooks, which Dynamo guards slowly, with
                several guards for each module.
            strict: an error of Dynamo's ends the call; otherwise the code that Dynamo
                fails on is left to Python.
        """
        fresh = types.FunctionType(
            entry.__code__.replace(co_name=entry.__code__.co_name),
            entry.__globals__,
            entry.__name__,
            entry.__defaults__,
            entry.__closure__,
        )
        self._frames = _Frames(backend, fresh.__code__, hooked=hooked, strict=strict)
        context: Any = torch._dynamo.optimize(backend=backend)
        if hasattr(context, "callback"):  # absent where TORCHDYNAMO_DISABLE is set
            self._frames.rule(context.callback)
        self.skipped = self._frames.skipped  # code that Dynamo has left to Python
        self._compiled: Callable[..., Any] = context(fresh)

    def root_of(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model that the paths of modules in a call of `model` begin at."""
        return model

    def leave(self, left: Left) -> None:
        """Notes code that Dynamo leaves to Python, after the call in which it does."""

    @property
    def is_captured(self) -> bool:
        """Whether Dynamo has graphs of the entry: `torch._dynamo.reset()` drops all."""
        return any(map(entries_of, self._frames.captured))

    @property
    def is_whole(self) -> bool:
        """Whether Dynamo has followed every call from its first line to its last."""
        return self.is_captured and self._frames.left_nothing

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled entry; after an error Dynamo looks at its code again.

        Dynamo would leave a frame that raises while it is traced
        (`if x.isnan().any(): raise`, and bad arguments) to Python from then on, even
        with good arguments.
        """
        skipped = self.skipped
        before = len(skipped)
        try:
            result = self._alone(*args, **kwargs)
        except Exception:
            for left in skipped[before:]:
                if not left.at_limit:
                    set_frames_action(left.code, "DEFAULT", "DEFAULT")
            del skipped[before:]
            raise
        if self._frames.has_captured:
            self._frames.leave_changing()
        for left in skipped[before:]:
            if left.is_said:
                self.leave(left)
        return result

    @root_frame
    def _alone(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled entry, again where a trace of another thread forbade it.

        The flag of torch.fx that forbids it is one for all threads.  A trace of ours,
        or of Dynamo's, holds Dynamo's lock: a thread that has the lock and still sees
        the flag is traced itself, or beside a trace of the user's own.
        """
        while True:
            try:
                return self._compiled(*args, **kwargs)
            except RuntimeError as error:
                if _FORBIDDEN not in str(error):
                    raise
                with lock():
                    if fx_tracing():
                        raise


class _Frames:
    """Has Dynamo compile frames under our configuration; notes the code it leaves.

    Dynamo's frame callback runs only when a frame is compiled, so a converted call pays
    nothing for this object, and everywhere else torch's configuration is the user's.

    Attributes:
        captured: code that has graphs.
        skipped: code that is left to Python.
    """

    def __init__(
        self, backend: Backend, entry: types.CodeType, *, hooked: bool, strict: bool
    ) -> None:
        """Args: `entry` is the code calls begin with; the rest as `CompiledEntry`'s."""
        self.captured: list[types.CodeType] = []
        self.skipped: list[Left] = []
        self._backend = backend
        self._entry = entry
        self._strict = strict
        self._options = {
            **_COMPILE_TIME_CONFIG,
            "skip_nnmodule_hook_guards": not hooked,
        }
        self._exceeded: dict[types.CodeType, Any] = {}
        self._modules: defaultdict[types.CodeType, set[int]] = defaultdict(set)
        self._raced: Counter[types.CodeType] = Counter()
        self._changing = Changing(backend)
        self._paths = Paths(backend.apart)

    def rule(self, callback: Any) -> None:
        """Has Dynamo's callback go through this object.

        The class of the one callback is replaced, because the C side walks the
        callback's own attributes and crashes on a wrapping object.
        """
        base, frames = type(callback), self

        def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            entries = len(entries_of(frame.f_code))
            with lock():
                found = len(entries_of(frame.f_code))
                frames._raced[frame.f_code] += found > entries
                return frames._counted(self, base, frame, *args, **kwargs)

        callback.__class__ = type(base.__name__, (base,), {"__call__": call})

    def _counted(
        self, callback: Any, base: Any, frame: Any, *args: Any, **kw: Any
    ) -> Any:
        """Dynamo's result for a frame; too much captured leaves the frame to Python."""
        amount = self._backend.amount
        if amount.too_much:
            self._backend.stop()
            found = ConvertFrameReturn()
            found.apply_to_code = False  # our limit is not other models'
            return found
        before, seen = self._backend.nodes, seen_frames()
        found = self._compiled(callback, base, frame, *args, **kw)
        if was_traced(found, seen):
            nodes = self._backend.nodes - before
            amount.note((frame.f_code, *sorted(module_of(frame))), nodes)
        return found

    def _compiled(
        self, callback: Any, base: Any, frame: Any, *args: Any, **kw: Any
    ) -> Any:
        """Dynamo's result for a frame."""
        code, known = frame.f_code, self._modules[frame.f_code]
        before = len(known)
        known.update(module_of(frame))
        if code in self._exceeded and len(known) == before:
            return self._exceeded[code]
        note_ddp_mode(torch._dynamo.config.optimize_ddp)
        as_is = self._backend.runs_as_is
        recurrent = recurrent_results() if as_is else nullcontext()
        soft, error, breaks = failed_frames(), "", graph_breaks()
        changed = self._changing.changed(frame)
        # Without `allow_rnn` nn.LSTM, GRU and RNN give no graph.  A compiler would take
        # their steps apart, and the LSTM that inductor compiles raises (torch 2.13).
        limits = _limits(self._uncounted(code))
        options = {**self._options, **limits, "allow_rnn": as_is}
        for name, codes in (
            (_WHOLE_NUMBERS, self._changing.whole_numbers),
            (_NO_OPS, {self._entry}),  # a method that computes nothing is captured too
        ):
            if code in codes:
                options[name] = True
        config = torch._dynamo.config
        followed = authors_followed(self._backend.dtype_in)
        regions = regions_begin_when_entered()
        fakes, grads = fakes_on_meta(), wide_gradients_hidden(frame)
        place = placed(frame, self._paths)
        tracing = config.patch(options), recurrent, followed, regions, fakes, grads
        with ExitStack() as around:
            for each in (*tracing, place, quietly()):
                around.enter_context(each)
            try:
                found = base.__call__(callback, frame, *args, **kw)
                if layer_left(frame, found):
                    found = layer_captured(callback, frame, *args, **kw) or found
                if found.guarded_code is not None:
                    guard_place(found, self._paths, inner=code is not self._entry)
            except Exception as caught:
                if self._strict or not may_be_left(caught):
                    raise
                # The frame runs as Python from its first line.  (A second call of the
                # model would draw random numbers, and fill lists, a second time.)
                found, error = ConvertFrameReturn(), said_in_a_line(caught)
        if found.guarded_code is not None and code not in self.captured:
            self.captured.append(code)
        if found.guarded_code is not None and changed is not None:
            self._changing.note(changed)
        if found.guarded_code is None and found.apply_to_code:
            said = bool(error) or broken_off(frame, found, soft)
            self._left(code, found, error, broke_since(breaks) if said else None)
        return found

    @property
    def left_nothing(self) -> bool:
        """Whether Dynamo has left no code to Python except code without a tensor op."""
        return not self._exceeded and all(left.is_empty for left in self.skipped)

    @property
    def has_captured(self) -> bool:
        """Whether frames were captured since `leave_changing` was last called."""
        return self._changing.has_captured

    def leave_changing(self) -> None:
        """Leaves code to Python that changes the values its graphs were made for."""
        with lock():
            for code, place in self._changing.found():
                set_frames_action(code, "SKIP", "DEFAULT")
                self.skipped.append(
                    Left(code, is_said=code is not self._entry, changes=place)
                )

    def _uncounted(self, code: types.CodeType) -> int:
        """How many graphs of `code` do not count for the recompile limit.

        Graphs of other backends; one for each further block of a model, where blocks of
        several sizes share one code object after a graph break; one for each thread
        that waited while another made the same graph.
        """
        others = sum(each.backend is not self._backend for each in entries_of(code))
        return others + max(len(self._modules[code]) - 1, 0) + self._raced[code]

    def _left(
        self, code: types.CodeType, found: Any, error: str, broke_at: str | None
    ) -> None:
        """Notes that Dynamo leaves `code` to Python, after a graph break if not None.

        Nothing is said about the entry, whose calls without a graph are counted.
        """
        own = code is self._entry
        if found.frame_exec_strategy.cur_action.name != "RUN_ONLY":
            said = broke_at is not None
            left = Left(code, is_said=said and not own, error=error, is_broken=said)
            left = left._replace(is_empty=has_no_ops(found), broke_at=broke_at or "")
            self.skipped.append(left)
            return
        found.apply_to_code = False  # our limit is not other models'
        # Torch would leave the callees to Python too.
        found.frame_exec_strategy = frames_strategy("RUN_ONLY", "DEFAULT")
        self._exceeded[code] = found
        if not own:
            self.skipped.append(Left(code, at_limit=True))


def _limits(more: int) -> dict[str, int]:
    return {name: getattr(torch._dynamo.config, name) + more for name in _LIMITS}
