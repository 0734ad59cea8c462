"""The `forward` of a converted model, or of a module in it that is called by itself.

An entry keeps its compiled code, calls the model through the graphs of that code, and
reports calls that ran no graph.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.errors import CaptureError
from autoamp.messages import log_once, signs_of_life
from autoamp.runtime.autocast_fallback import (
    TRANSFORMED,
    Aside,
    Rest,
    captured_often,
    why_no_graph,
)
from autoamp.runtime.captured_graph import (
    all_widened,
    autocast_for,
    fp32_results,
    unscaled_dtype,
)
from autoamp.runtime.compile_backend import (
    AS_WRITTEN,
    ONE_GRAPH,
    USERS_BACKENDS,
    traced_for_us,
    users_backend,
)
from autoamp.runtime.conversion_record import announce, tell_progress
from autoamp.runtime.engine import Engine
from autoamp.runtime.forward import plain_function
from autoamp.runtime.program import (
    THREAD,
    Program,
    likeness,
    program_for,
    tell_ranks,
    under_compilation,
)
from autoamp_said import logger_of

logger = logger_of(__name__)


class Hooks:
    """The hooks that calls of one conversion's models have met.

    Attributes:
        guarded: whether code compiled from now on guards the hooks of modules.
    """

    def __init__(self) -> None:
        self.guarded = False
        self._everywhere = False
        self._unhooked: dict[int, tuple[weakref.ref[nn.Module], int]] = {}

    def are_new(self, model: nn.Module) -> bool:
        """Whether there are hooks to guard, or hooks on all modules came or went."""
        if compat.hooks_everywhere() != self._everywhere:
            return True  # Dynamo never guards hooks on all modules
        if self.guarded:
            return False
        # A look at every module of the model at each call would cost more than the
        # call: it is made only where somebody has registered a hook since.
        added = compat.hooks_of_others()
        known = self._unhooked.get(id(model))
        if known is not None and known[1] == added and known[0]() is model:
            return False
        if compat.has_hooks(model):
            return True
        for known_id, (other, _) in list(self._unhooked.items()):
            if other() is None:
                self._unhooked.pop(known_id, None)
        self._unhooked[id(model)] = weakref.ref(model), added
        return False

    def guard(self) -> bool:
        """Guards hooks from now on; returns whether the code must be compiled anew."""
        everywhere = compat.hooks_everywhere()
        if self.guarded and self._everywhere == everywhere:
            return False  # another thread was first
        self.guarded, self._everywhere = True, everywhere
        return True


_TRACED = (
    "torch.fx has traced it (symbolic_trace, make_fx): the trace holds the model's own "
    "code, in fp32; convert the traced module, or let the tracer's `is_leaf_module` "
    "return True for this model"
)

_FORWARD_MODE = (
    "calls in forward-mode AD (jvp, jacfwd, dual numbers) run in fp32, because its "
    "tangents do not follow low precision"
)

_RECOMPILE_LIMIT = 8
"""Dynamo's recompile limit per code object: after so many graphs it makes no more."""

_MOST_COMPILATIONS = 8
"""How many compilations there may be before `_start_afresh` adds no more."""

_MOST_IN_VAIN = 2
"""How many calls in a row may capture nothing before autocast takes over."""

_PARTS = (
    "modules in it that are called by themselves have {} graphs of their own: call the "
    "model, whose graph holds them all"
)

_SPARSE = "it computes on sparse tensors, which Dynamo does not capture"


class Entry:
    """The `forward` of one module of a conversion, shared by the model's deep copies.

    Attributes:
        engine: has the graphs made ready, and keeps their record.
        owner: the class of the module.
        of_class: `forward` is the class's; otherwise the instance has its own.
        path: the module's path in the converted model; "" for the model itself.
        program: `forward` compiled by Dynamo; None before the first call.
    """

    path = ""

    def __init__(
        self, engine: Engine, owner: type[nn.Module], *, of_class: bool = True
    ) -> None:
        self.engine = engine
        self.owner, self.of_class = owner, of_class
        self.program: Program | None = None
        # A mode is (grad, inference, training): each has graphs of its own, and a first
        # call in it that is made under the lock.
        self._modes: set[tuple[bool, bool, bool]] = set()
        self._hooks = Hooks()
        self._without_turn: Program | None = None
        self._resting: dict[tuple[bool, bool, bool], Rest] = {}
        self._compilations = self._graphs_before = 0
        self._in_vain = 0
        # Why no call is captured any more; None while calls are.
        self._aside: Aside | None = None
        # Why calls with tensors of these classes stand aside.
        self._failed_on: dict[tuple[type, ...], Aside] = {}
        # Why calls stand aside that fit no graph, once Dynamo makes no more.
        self._past_limit: Aside | None = None
        self._children: dict[str, Entry] = {}
        self._by_backend: dict[int, Entry] = {}
        self._lock = threading.RLock()

    @functools.cached_property  # few calls need it
    def plain(self) -> Callable[..., Any]:
        """`forward` as a function of the model, not compiled."""
        return plain_function(self.owner, self.of_class)

    def run_by(self, engine: Engine) -> Entry:
        """The entry of the same `forward` whose graphs `engine` makes ready."""
        entry = type(self)(engine, self.owner, of_class=self.of_class)
        entry.path = self.path
        return entry

    def leave_to_autocast(self, why: str, *, aloud: bool = False) -> None:
        """Has all calls, of modules inside too, run under `torch.autocast`."""
        self._aside = Aside(why, of_parts=True)
        self.engine.record.note(self._aside.said, aloud=aloud)

    def renew(self, owner: type[nn.Module]) -> None:
        """Makes the `forward` of `owner` the code that is compiled from now on."""
        with self._lock:
            self.owner = owner
            self.__dict__.pop("plain", None)
            self.program = self._without_turn = None
            self._modes.clear()
            self._resting.clear()
            self._by_backend.clear()

    # A compilation of the user's may leave our `forward` to Python (of an LSTM), and
    # would go on to this code, for which torch 2.13 makes bytecode that is wrong.
    @compat.never_captured
    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`model(*args, **kwargs)` in mixed precision, or fp32 where disabled."""
        tell_ranks(model, self.engine.record.scaling)
        if THREAD.off:
            self.engine.record.scaling.ledger.note_called()
            return self.plain(model, *args, **kwargs)
        if compat.transforms_active():
            held = *nn.Module.parameters(model), *nn.Module.buffers(model)
            # `vmap` of `torch.autograd.grad` is active while a backward computes a
            # checkpoint again, whose values no transform has wrapped.
            region = compat.past_transforms((args, kwargs, held))
            if region is None:
                return self._stand_aside(model, args, kwargs, TRANSFORMED)
            with region:
                return self(model, args, kwargs)
        if self.engine.record.left_to_script:
            self.engine.record.calls += 1
            self.engine.record.aside += 1
            self.engine.record.scaling.ledger.note_called()
            return self._as_written(model, *args, **kwargs)
        if self._aside is not None or self._failed_on:
            aside = self._aside_of(model, args, kwargs)
            if aside is not None:
                return self._stand_aside(model, args, kwargs, aside)
        if compat.any_autocast():
            # Our graphs hold their own casts.  The script's region would cast once more
            # inside them, and a half input would be captured as another graph.
            args, kwargs = all_widened(args, kwargs)
            with compat.autocast_off():
                return self._in_turn(model, args, kwargs)
        return self._in_turn(model, args, kwargs)

    def _in_turn(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a call; the first call in a mode holds the lock, so it captures once."""
        if self._hooks.are_new(model):
            self._guard_hooks()
        inference = torch.is_inference_mode_enabled()
        mode = torch.is_grad_enabled(), inference, model.training
        if mode in self._modes:
            if mode not in self._resting:
                return self._run(model, args, kwargs)
            if not self._resting[mode].is_over(args, kwargs):
                self.engine.record.calls += 1
                return self._as_written(model, *args, **kwargs)
        with self._lock:
            # Without the lock, eight threads at a first call made eight captures of one
            # graph: all that Dynamo makes of a function before its recompile limit.
            program = self.program or self._joined(model, args, kwargs)
            self._bound(model)
            aside = self._aside_of(model, args, kwargs)
            if aside is not None:
                return self._stand_aside(model, args, kwargs, aside)
            if mode in program.captured_modes:
                result = self._run(model, args, kwargs)
            else:
                # A call in which Dynamo fails is made again, and draws the same
                # numbers.
                drawn = compat.Generators()
                with signs_of_life(
                    functools.partial(tell_progress, self.engine.record)
                ):
                    result = compat.with_room(self._run, model, args, kwargs, drawn)
            program.captured_modes.add(mode)
            program.tell(self.engine)
            if self._aside is None:
                announce(self.engine.record)
        self._resting.pop(mode, None)
        if self.engine.rests and self.engine.record.stays_fp32:
            self._resting[mode] = Rest(args, kwargs)
        self._modes.add(mode)
        if mode[0] and self.engine.record.calls:
            self.engine.record.scaling.ledger.note_called()
        return result

    def _guard_hooks(self) -> None:
        """Compiles the code anew if modules have hooks that its graphs do not guard."""
        with self._lock:
            were_guarded = self._hooks.guarded
            if not self._hooks.guard():
                return
            self._modes.clear()
            program = self.program
            # Hooks on all modules may come and go: two programs take turns.
            if were_guarded and self._without_turn is not None:
                self.program = self._without_turn
            elif program is not None:
                self._compile()
            self._without_turn = program if were_guarded else None

    def _run(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        drawn: compat.Generators | None = None,
    ) -> Any:
        """Runs a call through its graphs.

        Args:
            drawn: at a first call, the random generators before the call.
        """
        engine, program = self.engine, self.program
        if program is None:
            program = self._joined(model, args, kwargs)
        elif engine.differentiated_twice and not program.backend.runs_as_is:
            program = self._compile()
        engine.record.calls += 1
        local, modes = engine.local, compat.Modes()
        runs, rewritten, local.error = local.runs, local.rewritten, None
        result, had = None, len(engine.record.graphs)
        past_limit: Aside | None = None
        outer = THREAD.engine, THREAD.as_written, local.regions
        THREAD.engine, THREAD.as_written = engine, False
        local.regions = compat.autocast_nesting()
        try:
            result = program(model, *args, **kwargs)
        except compat.NoMoreGraphsError as full:
            # One line is said of such calls, whatever else differs between them.
            past_limit = self._past_limit or Aside(str(full), some=True)
            self._past_limit = past_limit
        except Exception as caught:
            # Code that raises while Dynamo runs it may leave grad mode, autocast or
            # Dynamo's own callback as they were inside.
            modes.restore()
            if local.error is not None:  # our own error, which Dynamo has wrapped
                error, local.error = local.error, None
                raise error from error.__cause__
            traced = compat.other_tracing()
            if not (traced or compat.is_capture_error(caught)):
                raise
            if drawn is not None:
                drawn.restore()
            engine.record.forget(had, local.runs - runs)
            result = self._in_python(caught, model, args, kwargs)
            if not traced:
                engine.record.aside += 1
                return result
        except BaseException:  # the user's interrupt
            modes.restore()
            raise
        finally:
            THREAD.engine, THREAD.as_written, local.regions = outer
        if past_limit is not None:
            engine.record.calls -= 1  # `_stand_aside` counts the call
            engine.record.forget(had, local.runs - runs)
            self._bound(model)
            return self._stand_aside(model, args, kwargs, self._aside or past_limit)
        if engine.record.unfinished:
            engine.record.keep_run()
        self._count(model, local.runs - runs, local.rewritten - rewritten)
        return result

    def _count(self, model: nn.Module, runs: int, rewritten: int) -> None:
        """Counts a call in which so many graphs ran, some of them rewritten ones."""
        engine = self.engine
        if rewritten < runs:
            engine.record.in_part += rewritten > 0
            engine.record.aside += not rewritten
        if engine.is_new:
            self._bound(model)
            engine.tell()
        if runs:
            self._in_vain = 0
        elif self._aside is not None:
            engine.record.aside += 1
        else:
            self._ran_nothing()

    def _in_python(
        self,
        error: Exception,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Repeats a call in which Dynamo itself failed, with the model's own code.

        Raises:
            Exception: the error of the model's own code; where there is none, under
                `strict`, Dynamo's error.
        """
        # A model that runs in fp32 must not fail because Dynamo fails, and an error of
        # the model must come with the traceback of the model's own code.
        low = unscaled_dtype(self.engine.record.low)
        region: Any = autocast_for(model, args, low)
        if compat.other_tracing():  # the trace holds the model's own code
            region = contextlib.nullcontext()
        try:
            with region:
                result = self._as_written(model, *args, **kwargs)
        except Exception as own:
            self._compile()
            raise own from own.__cause__  # not from Dynamo's error, which says the same
        if compat.other_tracing():
            return result
        if self.engine.options.strict:
            raise error
        why = compat.said_in_a_line(error)
        said = f"Dynamo failed in a call, which ran under torch.autocast: {why}"
        wrappers = compat.wrappers_in((args, kwargs))
        if wrappers:  # its next call would fail as well, and as late
            self._failed_on[wrappers] = Aside(compat.failure_on(wrappers), some=True)
            said = self._failed_on[wrappers].said
        self.engine.record.note(said)
        return fp32_results(result, low)

    def _aside_of(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Aside | None:
        """Why a call of `model` stands aside from graphs; None if it is captured."""
        aside = self._aside
        if aside is not None and (not aside.while_hooked or compat.has_hooks(model)):
            return aside
        if not self._failed_on:
            return None
        return self._failed_on.get(compat.wrappers_in((args, kwargs)))

    def _stand_aside(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        aside: Aside,
    ) -> Any:
        """Runs the model's own code, under autocast where nothing forbids that.

        Raises:
            CaptureError: `strict` is set.
        """
        engine = self.engine
        if engine.options.strict:
            raise CaptureError(f"{engine.record.label}: {aside.said}")
        engine.record.calls += 1
        engine.record.aside += 1
        engine.record.scaling.ledger.note_called()
        # Torch gives the tangent of a low norm with fp32 parameters another dtype than
        # the norm's result, and the next product raises on the two dtypes.
        if compat.forward_mode():
            engine.record.note(_FORWARD_MODE)
            return self._as_written(model, *args, **kwargs)
        engine.record.note(aside.said)
        # Values leave such code by other ways than its result, and their readers
        # are not written for low precision.
        if aside.as_written:
            return self._as_written(model, *args, **kwargs)
        # Nothing scales the loss in such a region: where gradients are recorded it is
        # bf16, whose range is that of fp32.
        low = unscaled_dtype(engine.record.low)
        with contextlib.ExitStack() as around:
            if compat.transforms_active():
                around.enter_context(compat.attention_in_one_dtype(low))
            with autocast_for(model, args, low, cached=aside.of_parts):
                result = self._as_written(model, *args, **kwargs)
            return fp32_results(result, low)

    def _as_written(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own code, of which no part is captured by itself."""
        outer = THREAD.engine, THREAD.as_written
        THREAD.engine, THREAD.as_written = self.engine, True
        try:
            return self.plain(model, *args, **kwargs)
        finally:
            THREAD.engine, THREAD.as_written = outer

    def _bound(self, model: nn.Module) -> None:
        """Has autocast stand in where no more of the model is to be captured."""
        if self.engine.computes_on_nested:
            self.leave_to_autocast("it computes on nested tensors")
        amount = self.engine.amount
        why = amount.too_much
        if not why or self._aside is not None:
            return
        with self._lock:
            is_python = amount.is_mostly_python
            if self.path and not is_python:
                why = _PARTS.format(amount.graphs)
            # The hooks of a FLOP counter stay for one call: calls without hooks are
            # captured anew.
            while_hooked = compat.has_hooks(model)
            self._aside = Aside(why, as_written=is_python, while_hooked=while_hooked)
            if while_hooked:
                self.engine.amount = compat.Amount()
            self.engine.record.note(self._aside.said)
            self._compile()
            self._modes.clear()

    def of_child(self, path: str, owner: type[nn.Module], *, of_class: bool) -> Entry:
        """The entry for calls of the module at `path` that no other call includes.

        One thread asks at a time: the caller has a lock.  (Under the lock of this entry
        a first call in another thread may be waiting for Dynamo's, which we hold.)
        """
        child = self._children.get(path)
        if child is None or (child.owner, child.of_class) != (owner, of_class):
            child = Entry(self.engine, owner, of_class=of_class)
            child.path = path
            if self._aside is not None and self._aside.of_parts:
                child._aside = self._aside
            self._children[path] = child
        return child

    def compiled_by(self, backend: int) -> Entry:
        """The entry whose graphs are compiled by `USERS_BACKENDS[backend]`."""
        if self.engine.options.backend != "eager":
            return self  # the user has named the compiler of the graphs
        with self._lock:
            if backend not in self._by_backend:
                engine = self.engine.compiled_by(USERS_BACKENDS[backend])
                self._by_backend[backend] = self.run_by(engine)
        return self._by_backend[backend]

    def _ran_nothing(self) -> None:
        """Reports that a call ran no graph, and has the model compiled anew."""
        engine = self.engine
        if compat.fx_tracing():  # no real call: torch.fx makes another program
            engine.record.calls -= 1
            engine.record.note(_TRACED)
            engine.record.scaling.ledger.note_called()  # and it has been said
            return
        hidden, program = compat.hides_calls(), self.program
        if not hidden and program is not None and program.computes_nothing:
            engine.record.calls -= 1  # `self.encoder.get_num_params()`
            return
        engine.record.aside += 1
        why = why_no_graph(self.program, self.has_many)
        said = f"a call of 'forward' ran no rewritten graph, so it ran in fp32: {why}"
        if program is not None:
            # Another model that joined would run the code that Dynamo has given up.
            program.stepped_aside = True
        if hidden:
            self._start_afresh()
        else:
            self._in_vain += 1
            frames = program.skipped if program is not None else []
            is_sparse = any(each.is_sparse for each in frames)
            self._start_afresh()
            if is_sparse and not engine.options.strict:
                self.leave_to_autocast(_SPARSE, aloud=True)
                return
            # At the recompile limit we go on, because existing graphs still run.
            if self._in_vain >= _MOST_IN_VAIN and not self.has_many:
                self._aside = Aside(why)
        if engine.options.strict:
            raise CaptureError(f"{engine.record.label}: {said}")
        engine.record.note(said)

    @property
    def has_many(self) -> bool:
        """Whether so many graphs were captured that Dynamo may make no more."""
        graphs = len(self.engine.record.graphs) - self._graphs_before
        return graphs >= _RECOMPILE_LIMIT

    def _joined(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Program:
        """The program shared by all models like this one, taken at its first call."""
        what = self._shared
        if what is not None:
            like = likeness(model, args, kwargs)
            what = None if like is None else (what, self._named_in(model), like)
        program = self._begin(what)
        automatic = self.engine.record.scaling.automatic and not self.path
        if automatic and not program.captured_modes and (why := captured_often(model)):
            self.leave_to_autocast(why)
            warning = f"autoamp: {self.engine.record.label}: {Aside(why).said}"
            log_once(logger, logging.WARNING, warning)
        return program

    def _named_in(self, model: nn.Module) -> Hashable:
        """The options that name modules of this part of a model, by the modules' paths.

        Parts that are alike share graphs unless options name some of their modules.
        """
        if not self.path:
            return None  # models with equal options have equal paths
        named = compat.named_modules_of(model, self.path)
        keys = ((path, self.engine.apart(path)) for path, _ in named)
        start = len(self.path)
        return tuple((path[start:], key) for path, key in keys if key is not None)

    def _compile(self) -> Program:
        """A new program for this model alone, whatever models like it share."""
        return self._begin(None)

    def _begin(self, what: Hashable | None) -> Program:
        own = plain_function(self.owner, self.of_class)
        self.program = program_for(what, own, self.engine, hooked=self._hooks.guarded)
        self._compilations += 1
        self._graphs_before = len(self.engine.record.graphs)
        return self.program

    @property
    def _shared(self) -> Hashable | None:
        """A key equal for entries that have the same code, or None."""
        function: Any = self.owner.forward
        is_own = not (self.of_class and isinstance(function, types.FunctionType))
        if is_own or not self.engine.shares_graphs:
            return None
        # Weak references compare equal while their classes are the same, and the table
        # of programs keeps no class alive.
        return weakref.ref(self.owner), weakref.ref(function)

    def _start_afresh(self) -> None:
        """Compiles the code anew, at most until `_MOST_COMPILATIONS` are made."""
        # Dynamo never looks again at code that it once refused: without new code, one
        # call under a FlopCounterMode would leave the model in fp32 for good.  At the
        # recompile limit new code would only reach the limit again.
        if self._compilations < _MOST_COMPILATIONS and not self.has_many:
            self._compile()
            self._modes.clear()

    def inlined(
        self,
        plain: Callable[..., Any],
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Makes a call that Dynamo traces as part of a larger graph.

        Inside a converted parent, the call becomes a part of the parent's graph.  In a
        compilation of the user's own, the graph is broken here; the model's graphs are
        rewritten and then compiled by the user's backend.  Where the graph must not be
        broken (`fullgraph=True`), our pass never runs, and autocast stands in for it;
        fp32 does where the options keep modules or ops in fp32.

        Raises:
            CaptureError: the graph must not be broken, and `strict` is set.
        """
        if not under_compilation():  # reached from code that was compiled before
            return self(model, args, kwargs)
        if traced_for_us():
            return plain(model, *args, **kwargs)
        options = self.engine.options
        backend = users_backend(options.strict)
        if backend == AS_WRITTEN:
            return plain(model, *args, **kwargs)
        if backend != ONE_GRAPH:
            return _apart(self, backend, model, args, kwargs)
        if options.asks_for_fp32:
            return plain(model, *args, **kwargs)
        low = unscaled_dtype(self.engine.record.low)
        with autocast_for(model, args, low):
            result = plain(model, *args, **kwargs)
        return fp32_results(result, low)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apart(
    forward: Entry,
    backend: int,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Makes a call from the user's compilation, whose graph is broken at the call."""
    return forward.compiled_by(backend)(model, args, kwargs)
