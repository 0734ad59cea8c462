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
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autoamp import compat
from autoamp.errors import CaptureError
from autoamp.messages import log_once, signs_of_life
from autoamp.runtime.compile_backend import (
    ONE_GRAPH,
    RUNS_OUR_PASS,
    USERS_BACKENDS,
    traced_for_us,
    users_backend,
)
from autoamp.runtime.eligible import parameters_of
from autoamp.runtime.engine import Engine
from autoamp.runtime.forward import plain_function
from autoamp.runtime.graph import (
    all_widened,
    autocast_for,
    fp32_results,
    unscaled_dtype,
)
from autoamp.runtime.program import (
    THREAD,
    Program,
    likeness,
    program_for,
    tell_ranks,
    under_compilation,
)
from autoamp.runtime.record import announce, tell_progress
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

_AS_WRITTEN = "calls run in fp32, as they are written, because "
_INSTEAD = "calls run under torch.autocast instead of rewritten graphs, because "

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
        self._resting: dict[tuple[bool, bool, bool], _Rest] = {}
        self._compilations = self._graphs_before = 0
        self._in_vain = 0
        # The reasons why calls run under autocast: of this `forward`, and of all.
        self._by_autocast = self._left_to_autocast = self._no_graph = ""
        # Why calls with tensors of these classes run under autocast.
        self._failed_on: dict[tuple[type, ...], str] = {}
        # The reason why no more is captured, whether that holds only while modules have
        # hooks, and whether such calls run in fp32 because they are mostly Python.
        self._bounded, self._only_hooked, self._is_python = "", False, False
        self._children: dict[str, Entry] = {}
        self._by_backend: dict[int, Entry] = {}
        self._lock = threading.RLock()

    @functools.cached_property  # few calls need it
    def plain(self) -> Callable[..., Any]:
        """`forward` as a function of the model, not compiled."""
        return plain_function(self.owner, self.of_class)

    def run_by(self, engine: Engine) -> Entry:
        """The entry of the same `forward` whose graphs `engine` makes ready."""
        found = type(self)(engine, self.owner, of_class=self.of_class)
        found.path = self.path
        return found

    def leave_to_autocast(self, why: str) -> None:
        """Has all calls, of modules inside too, run under `torch.autocast`."""
        self._by_autocast = self._left_to_autocast = why
        self.engine.record.note(_INSTEAD + why, aloud=False)

    def renew(self, owner: type[nn.Module]) -> None:
        """Makes the `forward` of `owner` the code that is compiled from now on."""
        with self._lock:
            self.owner = owner
            self.__dict__.pop("plain", None)
            self.program = self._without_turn = None
            self._modes.clear()
            self._resting.clear()
            self._by_backend.clear()

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
                return self._in_region(model, args, kwargs)
            with region:
                return self(model, args, kwargs)
        if self.engine.record.left_to_script:
            self.engine.record.calls += 1
            self.engine.record.aside += 1
            self.engine.record.scaling.ledger.note_called()
            return self._as_written(model, *args, **kwargs)
        if self._by_autocast or self._is_bounded(model):
            return self._in_region(model, args, kwargs)
        if self._failed_on:
            why = self._failed_on.get(compat.wrappers_in((args, kwargs)), "")
            if why:
                return self._in_region(model, args, kwargs, why)
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
            if self._by_autocast or self._is_bounded(model):
                return self._in_region(model, args, kwargs)
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
            if not (self._bounded or self._by_autocast):
                announce(self.engine.record)
        self._resting.pop(mode, None)
        if self.engine.rests and self.engine.record.stays_fp32:
            self._resting[mode] = _Rest(args, kwargs)
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
        result, no_graph, had = None, "", len(engine.record.graphs)
        outer = THREAD.engine, THREAD.as_written, local.regions
        THREAD.engine, THREAD.as_written = engine, False
        local.regions = compat.autocast_nesting()
        try:
            result = program(model, *args, **kwargs)
        except compat.NoMoreGraphsError as full:
            # One line is said of such calls, whatever else differs between them.
            no_graph = self._no_graph = self._no_graph or str(full)
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
            engine.record.forget(had)
            result = self._in_python(caught, model, args, kwargs)
            if not traced:
                engine.record.aside += 1
                return result
        except BaseException:  # the user's interrupt
            modes.restore()
            raise
        finally:
            THREAD.engine, THREAD.as_written, local.regions = outer
        if no_graph:
            engine.record.calls -= 1  # the region counts the call
            engine.record.forget_unused(had)
            self._bound(model)
            return self._in_region(model, args, kwargs, no_graph)
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
        elif self._bounded:
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
        given = compat.wrappers_in((args, kwargs))
        if given:  # its next call would fail as well, and as late
            self._failed_on[given] = compat.failure_on(given)
            said = f"some {_INSTEAD}{self._failed_on[given]}"
        self.engine.record.note(said)
        return fp32_results(result, low)

    def _in_region(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        no_graph: str = "",
    ) -> Any:
        """Runs the model's own code, as no rewritten graph can run: under autocast.

        Args:
            no_graph: why no graph fits this call, where others have graphs.
        """
        engine = self.engine
        transforms = "of vmap or torch.func"
        is_transformed = compat.transforms_active()
        why = self._by_autocast or (transforms if is_transformed else self._bounded)
        why = why or no_graph
        instead = _AS_WRITTEN if self._is_python else _INSTEAD
        if no_graph and why == no_graph:
            instead = f"some {_INSTEAD}"
        if engine.options.strict:
            said = _why_no_graph(self.program, self.has_many)
            if why in (self._bounded, no_graph):
                said = instead + why
            raise CaptureError(f"{engine.record.label}: {said}")
        engine.record.calls += 1
        engine.record.aside += 1
        engine.record.scaling.ledger.note_called()
        # Torch gives the tangent of a low norm with fp32 parameters another dtype than
        # the norm's result, and the next product raises on the two dtypes.
        if compat.forward_mode():
            engine.record.note(_FORWARD_MODE)
            return self._as_written(model, *args, **kwargs)
        engine.record.note(instead + why)
        # Values leave such code by other ways than its result, and their readers
        # are not written for low precision.
        if self._is_python:
            return self._as_written(model, *args, **kwargs)
        # Nothing scales the loss in such a region: where gradients are recorded it is
        # bf16, whose range is that of fp32.
        low, cached = unscaled_dtype(engine.record.low), bool(self._left_to_autocast)
        with contextlib.ExitStack() as around:
            if is_transformed:
                around.enter_context(compat.attention_in_one_dtype(low))
            with autocast_for(model, args, low, cached=cached):
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
        if not why or self._bounded:
            return
        with self._lock:
            # The hooks of a FLOP counter stay for one call: calls without hooks are
            # captured anew.
            self._only_hooked = compat.has_hooks(model)
            until = "; a call without hooks is captured" if self._only_hooked else ""
            self._is_python = amount.is_mostly_python
            if self.path and not self._is_python:
                why = _PARTS.format(amount.graphs)
            self._bounded = why + until
            if until:
                self.engine.amount = compat.Amount()
            said = _AS_WRITTEN if self._is_python else _INSTEAD
            self.engine.record.note(said + self._bounded)
            self._compile()
            self._modes.clear()

    def _is_bounded(self, model: nn.Module) -> bool:
        """Whether no more of a call of `model` is to be captured."""
        if not self._bounded:
            return False
        return not self._only_hooked or compat.has_hooks(model)

    def of_child(self, path: str, owner: type[nn.Module], *, of_class: bool) -> Entry:
        """The entry for calls of the module at `path` that no other call includes."""
        with self._lock:
            found = self._children.get(path)
            if found is None or (found.owner, found.of_class) != (owner, of_class):
                found = Entry(self.engine, owner, of_class=of_class)
                found.path = path
                found._by_autocast = found._left_to_autocast = self._left_to_autocast
                self._children[path] = found
        return found

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
        said = _why_no_graph(self.program, self.has_many)
        if program is not None:
            # Another model that joined would run the code that Dynamo has given up.
            program.stepped_aside = True
        if hidden:
            self._start_afresh()
        else:
            self._in_vain += 1
            left = program.skipped if program is not None else []
            is_sparse = any(each.is_sparse for each in left)
            self._start_afresh()
            if is_sparse and not engine.options.strict:
                engine.record.note(_INSTEAD + _SPARSE)
                self.leave_to_autocast(_SPARSE)
                return
            # At the recompile limit we go on, because existing graphs still run.
            if self._in_vain >= _MOST_IN_VAIN and not self.has_many:
                self._by_autocast = "Dynamo captured nothing"
        if engine.options.strict:
            raise CaptureError(f"{engine.record.label}: {said}")
        engine.record.note(said)

    @property
    def has_many(self) -> bool:
        """Whether so many graphs were captured that Dynamo may make no more."""
        made = len(self.engine.record.graphs) - self._graphs_before
        return made >= _RECOMPILE_LIMIT

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
        if automatic and not program.captured_modes and (why := _captured_often(model)):
            self.leave_to_autocast(why)
            said = f"autoamp: {self.engine.record.label}: {_INSTEAD}{why}"
            log_once(logger, logging.WARNING, said)
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
        own = not (self.of_class and isinstance(function, types.FunctionType))
        if own or not self.engine.shares_graphs:
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
        if backend == RUNS_OUR_PASS:
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


# -- calls that run no rewritten graph: why, and which need none -----------------------


def _why_no_graph(program: Program | None, has_many: bool) -> str:
    """Says that a call ran no rewritten graph, and why.

    Args:
        program: the compiled `forward` during the call.
        has_many: whether Dynamo makes no more graphs of `forward`.
    """
    why = _in_the_callers_hands() or _left_by_dynamo(program, has_many)
    return f"a call of 'forward' ran no rewritten graph, so it ran in fp32: {why}"


def _in_the_callers_hands() -> str:
    if compat.transforms_active():
        return "vmap, torch.func or forward-mode AD transforms the call"
    if torch.compiler.is_exporting():
        return (
            "torch.export records the model's own code; autoamp.export(model, args) "
            "exports what a converted model runs"
        )
    if compat.jit_tracing():
        return "torch.jit.trace traces the call"
    mode = compat.dispatch_mode()
    if mode:
        return f"it was called in the dispatch mode {mode}, where Dynamo steps aside"
    return "a dispatch mode is active" if compat.hides_calls() else ""


def _left_by_dynamo(program: Program | None, has_many: bool) -> str:
    if compat.dynamo_disabled():
        return "Dynamo is switched off (TORCHDYNAMO_DISABLE, torch._dynamo.config)"
    if has_many:
        return (
            "Dynamo is at the recompile limit (torch._dynamo.config.recompile_limit), "
            "because each kind of call needs a graph of its own; TORCH_LOGS=recompiles "
            "shows how the calls differ"
        )
    left = program.skipped if program is not None else []
    error = next((each.error for each in left if each.error), "")
    if error:
        return f"Dynamo failed to trace the method: {error}"
    broken = next((each for each in left if each.is_broken), None)
    if broken is not None:
        return (
            "Dynamo cannot go on after a graph break in the method "
            f"({broken.broke_at or 'in a loop, a `with`, a `try`'}); "
            "TORCH_LOGS=graph_breaks tells where"
        )
    if any(each.is_empty for each in left):
        return "Dynamo met no tensor op to capture"
    return "Dynamo captured nothing; TORCH_LOGS=graph_breaks,recompiles tells why"


_MOST_OF_A_CLASS = 4
"""How many models of one class may be captured round the same weight."""

_CAPTURED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For the first weight of models, how many were captured, by their class's name."""


def _captured_often(model: nn.Module) -> str:
    """Notes that `model` is captured; why it should not be, where many like it were."""
    weight = next(iter(parameters_of(model)), None)
    if weight is None:
        return ""
    counts = _CAPTURED.setdefault(weight, Counter())
    owner = f"{type(model).__module__}.{type(model).__qualname__}"
    counts[owner] += 1
    if counts[owner] <= _MOST_OF_A_CLASS:
        return ""
    return (
        f"{_MOST_OF_A_CLASS} other modules of its class were captured round the same "
        "weights: make one, and call it each time"
    )


_LARGER = 4
"""A call with this many times the elements is captured: low precision may pay in it."""

_LONGEST = 1023
"""The size of a call is looked at after at most this many calls."""


class _Rest:
    """One mode of a model, after a capture in which all ops stayed fp32.

    Calls then run the model's own code, without the guards of a graph.  Only at calls
    1, 3, 7, 15, … after the capture the size of the arguments is looked at.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Args: the arguments of the call that was captured."""
        self._size = _elements((args, kwargs))
        self._left = self._since = 0

    def is_over(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments should be captured anew."""
        if self._left:
            self._left -= 1
            return False
        # Looks become rarer, so that small calls cost nothing in the long run.
        self._left = self._since = min(2 * self._since + 1, _LONGEST)
        return _elements((args, kwargs)) >= _LARGER * max(self._size, 1)


def _elements(given: Any) -> int:
    """The elements of all tensors in arguments, which may be nested."""
    if isinstance(given, torch.Tensor):
        return given.numel()
    if isinstance(given, dict):
        given = [*given.values()]
    if isinstance(given, tuple | list):
        return sum(map(_elements, given))
    return 0
