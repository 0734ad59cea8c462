"""The entry of a model, compiled by Dynamo with recompile limits of its own."""

from __future__ import annotations

import types
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

from autoamp.compat.backends import fx_tracing
from autoamp.compat.distributed import note_ddp_mode
from autoamp.compat.frames import (
    ConvertFrameReturn,
    Left,
    Since,
    entries_of,
    frames_strategy,
    has_no_ops,
    lock,
    may_be_left,
    module_of,
    said_in_a_line,
    set_frames_action,
)
from autoamp.compat.layers import layer_captured, layer_left
from autoamp.compat.limits import (
    Changing,
    NoMoreGraphsError,
    change_among,
    guards_against,
    too_many_hooked,
)
from autoamp.compat.module_paths import Paths, guard_place, placed, root_frame
from autoamp.compat.patches import dynamo_patched
from autoamp.compat.tensors import failure_on, wrappers_in

_FORBIDDEN = "using FX to symbolically trace"
"""A part of what Dynamo says, before anything has run, where torch.fx traces a call."""


_FULL = (
    "Dynamo is at the recompile limit (torch._dynamo.config.recompile_limit), and "
    "these calls need graphs of their own. They differ in {}"
)
_HOOKED = (
    "hooks come and go between these calls, and each set of hooks needs a graph of its "
    "own. They differ in {}: register a hook once, before the first call"
)


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
        backend: Any,
        *,
        hooked: bool,
        strict: bool,
    ) -> None:
        """Compiles nothing yet.

        Args:
            backend: gets each graph: the `Backend` of `runtime/program.py`.
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
        """Calls the compiled entry; after an error Dynamo looks at its code again."""
        skipped = self.skipped
        before = len(skipped)
        try:
            result = self._alone(*args, **kwargs)
        except Exception:
            # Dynamo would leave a frame that raises while it is traced
            # (`if x.isnan().any(): raise`, and bad arguments) to Python from then on,
            # even with good arguments.
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
        """Calls the compiled entry; again if a trace in another thread forbade it."""
        while True:
            try:
                return self._compiled(*args, **kwargs)
            except RuntimeError as error:
                if _FORBIDDEN not in str(error):
                    raise
                # The flag of torch.fx that forbids the call is one for all threads.  A
                # trace of ours, or of Dynamo's, holds Dynamo's lock: a thread that has
                # the lock and still sees the flag is traced itself, or beside a trace
                # of the user's own.
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
        self, backend: Any, entry: types.CodeType, *, hooked: bool, strict: bool
    ) -> None:
        """Args: `entry` is the code calls begin with; the rest as `CompiledEntry`'s."""
        self.captured: list[types.CodeType] = []
        self.skipped: list[Left] = []
        self._backend = backend
        self._entry = entry
        self._strict = strict
        self._hooked = hooked
        self._failed_on: dict[tuple[type, ...], str] = {}
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
        amount, is_entry = self._backend.amount, frame.f_code is self._entry
        if amount.too_much:
            self._backend.stop()
            if is_entry:
                raise NoMoreGraphsError(amount.too_much)
            found = ConvertFrameReturn()
            found.apply_to_code = False  # our limit is not other models'
            return found
        given = wrappers_in(frame.f_locals) if is_entry else ()
        if given and given in self._failed_on:
            raise NoMoreGraphsError(self._failed_on[given])
        against = guards_against(frame, self._backend) if is_entry else []
        if too_many_hooked(against):
            raise NoMoreGraphsError(_HOOKED.format(change_among(against, frame)))
        before, since = self._backend.nodes, Since()
        found = self._compiled(callback, base, frame, since, *args, **kw)
        if given and self._backend.nodes == before:
            found.apply_to_code = False  # other calls may give plain tensors
            why = self._failed_on[given] = failure_on(given)
            raise NoMoreGraphsError(why)
        if is_entry and found is self._exceeded.get(frame.f_code):
            # Nothing has run yet: the whole call may be made in another way.
            raise NoMoreGraphsError(_FULL.format(change_among(against, frame)))
        if since.was_traced(found):
            nodes = self._backend.nodes - before
            amount.note((frame.f_code, *sorted(module_of(frame))), nodes)
        return found

    def _compiled(
        self, callback: Any, base: Any, frame: Any, since: Since, *args: Any, **kw: Any
    ) -> Any:
        """Dynamo's result for a frame."""
        code, known = frame.f_code, self._modules[frame.f_code]
        before = len(known)
        known.update(module_of(frame))
        if code in self._exceeded and len(known) == before:
            return self._exceeded[code]
        config, as_is = torch._dynamo.config, self._backend.runs_as_is
        note_ddp_mode(config.optimize_ddp)
        error, changed = "", self._changing.changed(frame)
        with (
            config.patch(self._options(code, as_is)),
            dynamo_patched(
                frame, self._backend.dtype_in, self._backend.note, runs_as_is=as_is
            ),
            placed(frame, self._paths),
        ):
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
        if found.guarded_code is not None:
            if code not in self.captured:
                self.captured.append(code)
            if changed is not None:
                self._changing.note(changed)
        elif found.apply_to_code:
            said = bool(error) or since.broke_off(frame, found)
            self._left(frame, found, error, since.broke_at if said else None)
        return found

    def _options(self, code: types.CodeType, as_is: bool) -> dict[str, Any]:
        """Dynamo's options for a capture of `code`."""
        config = torch._dynamo.config
        # Graphs that do not count: models that share a code object have graphs of other
        # backends in its cache.
        more = sum(each.backend is not self._backend for each in entries_of(code))
        # Blocks of several sizes share one code object after a graph break, and threads
        # that waited while another made the same graph add one each.
        more += max(len(self._modules[code]) - 1, 0) + self._raced[code]
        counts, is_entry = code in self._changing.whole_numbers, code is self._entry
        return {
            # DDPOptimizer would cut a graph before our pass sees it: see `in_buckets`.
            "optimize_ddp": False,
            "skip_nnmodule_hook_guards": not self._hooked,
            "recompile_limit": config.recompile_limit + more,
            "accumulated_recompile_limit": config.accumulated_recompile_limit + more,
            # Without this nn.LSTM, GRU and RNN give no graph.  A compiler would take
            # their steps apart; the LSTM that inductor compiles raises (torch 2.13).
            "allow_rnn": as_is,
            "allow_unspec_int_on_nn_module": (
                counts or config.allow_unspec_int_on_nn_module
            ),
            # A method that computes nothing is captured too.
            "allow_empty_graphs": is_entry or config.allow_empty_graphs,
        }

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

    def _left(self, frame: Any, found: Any, error: str, broke_at: str | None) -> None:
        """Notes that Dynamo leaves a frame to Python, after a graph break if not None.

        Nothing is said about the entry, whose calls without a graph are counted.
        """
        code, own = frame.f_code, frame.f_code is self._entry
        if found.frame_exec_strategy.cur_action.name != "RUN_ONLY":
            said = broke_at is not None
            left = Left(
                code,
                is_said=said and not own,
                error=error,
                is_empty=has_no_ops(found),
                is_broken=said,
                broke_at=broke_at or "",
            )
            self.skipped.append(left)
            return
        found.apply_to_code = False  # our limit is not other models'
        # Torch would leave the callees to Python too.
        found.frame_exec_strategy = frames_strategy("RUN_ONLY", "DEFAULT")
        self._exceeded[code] = found
        if not own:
            against = guards_against(frame, self._backend)
            changes = change_among(against, frame)
            self.skipped.append(Left(code, at_limit=True, changes=changes))
