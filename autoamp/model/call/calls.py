"""Calls a converted model through its graphs, and reports calls that ran no graph."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.capture.autocast import all_widened, under_autocast, unscaled_dtype
from autoamp.capture.code import Code, Method
from autoamp.capture.engine import Engine
from autoamp.capture.program import RUNNING
from autoamp.errors import CaptureError
from autoamp.messages import signs_of_life
from autoamp.model.call.aside import INSTEAD, TRACED, ran_nothing
from autoamp.model.call.hooks import Hooks
from autoamp.model.call.rest import Rest
from autoamp.model.call.thread import THREAD, tell_ranks
from autoamp.model.call.users_compile import (
    ONE_GRAPH,
    RUNS_OUR_PASS,
    USERS_BACKENDS,
    apart,
    traced_for_us,
    users_backend,
)

logger = logging.getLogger(__name__)
under_compilation = torch.compiler.is_dynamo_compiling

_MOST_IN_VAIN = 2
"""How many calls in a row may capture nothing before autocast takes over."""


class CompiledCall:
    """The compiled entry of one conversion, shared by the model's deep copies."""

    def __init__(self, method: Method, engine: Engine) -> None:
        self.engine = engine
        self.low = engine.record.low
        self.method = method
        self._code = Code(method, engine)
        self._modes = self._code.called_modes  # looked at in every call
        self._by_backend: dict[int, CompiledCall] = {}
        self._methods: dict[str, CompiledCall] = {}
        self._resting: dict[tuple[bool, bool, bool], Rest] = {}
        self._hooks = Hooks()
        self._in_vain = 0
        self._by_autocast = self._left_to_autocast = ""
        self._lock = threading.RLock()

    def leave_to_autocast(self, why: str) -> None:
        """Has all calls, of other methods too, run under `torch.autocast`."""
        self._by_autocast = self._left_to_autocast = why
        self.engine.record.note(INSTEAD + why, aloud=False)

    def renew(self, method: Method) -> None:
        """Makes `method` the code that is compiled from now on."""
        with self._lock:
            self.method = method
            self._code.renew(method)
            self._resting.clear()
            self._by_backend.clear()

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`model(*args, **kwargs)` in mixed precision, or fp32 where disabled."""
        tell_ranks(model, self.engine.record.scaling)
        if THREAD.off:
            return self._code.entry(model, *args, **kwargs)
        if self._by_autocast or compat.transforms_active():
            return self._in_region(model, args, kwargs)
        if compat.any_autocast():
            args, kwargs = all_widened(args, kwargs)
            with compat.autocast_off():
                return self._in_turn(model, args, kwargs)
        return self._in_turn(model, args, kwargs)

    def _in_turn(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a call; the first in a mode alone, or each thread would capture it."""
        if self._hooks.are_new(model):
            self._guard_hooks()
        inference = torch.is_inference_mode_enabled()
        mode = torch.is_grad_enabled(), inference, model.training
        if mode in self._modes:
            if mode not in self._resting:
                return self._run(model, args, kwargs)
            if not self._resting[mode].is_over(args, kwargs):
                self.engine.record.calls += 1
                return self._code.entry(model, *args, **kwargs)
        with self._lock:
            program = self._code.program or self._code.joined(model, args, kwargs)
            if mode in program.captured_modes:
                result = self._run(model, args, kwargs)
            else:
                drawn = compat.Generators()
                with signs_of_life(self.engine.record.tell_progress):
                    result = compat.with_room(self._run, model, args, kwargs, drawn)
            program.captured_modes.add(mode)
            program.tell(self.engine)
            self.engine.record.announce()
        self._resting.pop(mode, None)
        if self.engine.record.stays_fp32:
            self._resting[mode] = Rest(args, kwargs)
        self._modes.add(mode)
        return result

    def _guard_hooks(self) -> None:
        """Compiles anew where modules have hooks that no graph guards."""
        with self._lock:
            if self._hooks.guard():
                self._code.hooked = True
                self._modes.clear()
                if self._code.program is not None:
                    self._code.compile()

    def _run(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        drawn: compat.Generators | None = None,
    ) -> Any:
        """Runs a call through its graphs.

        Args:
            drawn: the random generators before the call, where it is a first call.
        """
        engine, program = self.engine, self._code.program
        if program is None:
            program = self._code.joined(model, args, kwargs)
        elif engine.differentiated_twice and not program.backend.runs_as_is:
            program = self._code.compile()
        engine.record.calls += 1
        local, modes = engine.local, compat.Modes()
        runs, rewritten, local.error = local.runs, local.rewritten, None
        local.regions = compat.autocast_nesting()
        THREAD.inside += 1
        outer, RUNNING.engine = RUNNING.engine, engine
        try:
            result = program.call(model, *args, **kwargs)
        except Exception as caught:
            modes.restore()
            if local.error is not None:  # our error, wrapped by Dynamo
                error, local.error = local.error, None
                raise error from error.__cause__
            traced = compat.other_tracing()
            if not (traced or compat.is_capture_error(caught)):
                raise
            if drawn is not None:
                drawn.restore()
            result = self._in_python(caught, model, args, kwargs)
            if not traced:
                engine.record.aside += 1
                return result
        except BaseException:  # the user's interrupt
            modes.restore()
            raise
        finally:
            THREAD.inside -= 1
            RUNNING.engine = outer
        runs, rewritten = local.runs - runs, local.rewritten - rewritten
        if rewritten < runs:
            engine.record.in_part += rewritten > 0
            engine.record.aside += not rewritten
        if engine.is_new:
            engine.tell()
        if not runs:
            self._ran_nothing()
        else:
            self._in_vain = 0
        return result

    def _in_python(
        self,
        error: Exception,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Makes a call again in which Dynamo itself failed, by the model's own code.

        A model that runs in fp32 must not fail because Dynamo does, and an error of the
        model's own must be raised by the model's own code.

        Raises:
            Exception: the model's own; under `strict` the error of Dynamo's, where the
                model's own code raises none.
        """
        try:
            result = self._code.entry(model, *args, **kwargs)
        except Exception as own:
            self._code.compile()
            raise own from own.__cause__  # not from Dynamo's error, which says the same
        if compat.other_tracing():
            return result
        if self.engine.options.strict:
            raise error
        why = compat.said_in_a_line(error)
        self.engine.record.note(f"Dynamo failed in a call, which ran in fp32: {why}")
        return result

    def _in_region(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the model's own code under autocast, where no graph of ours can run."""
        engine = self.engine
        if engine.options.strict:
            said = ran_nothing(self.method.name, self._code)
            raise CaptureError(f"{engine.record.label}: {said}")
        why = self._by_autocast or "of vmap, torch.func or forward-mode AD"
        engine.record.note(INSTEAD + why)
        engine.record.calls += 1
        engine.record.aside += 1
        run = partial(under_autocast, cached=bool(self._left_to_autocast))
        return run(model, self._code.entry, unscaled_dtype(self.low), args, kwargs)

    def of(self, method: Method | None) -> CompiledCall:
        """The entry for calls of `method`, or for calls of `forward` if it is None."""
        if method is None:
            return self
        with self._lock:
            if method.name not in self._methods:
                self._methods[method.name] = found = CompiledCall(method, self.engine)
                found._by_autocast = found._left_to_autocast = self._left_to_autocast
        return self._methods[method.name]

    def compiled_by(self, backend: int) -> CompiledCall:
        """The entry whose graphs are compiled by `USERS_BACKENDS[backend]`."""
        if self.engine.options.backend != "eager":
            return self  # the user has named the compiler of the graphs
        with self._lock:
            if backend not in self._by_backend:
                engine = self.engine.compiled_by(USERS_BACKENDS[backend])
                self._by_backend[backend] = CompiledCall(self.method, engine)
        return self._by_backend[backend]

    def _ran_nothing(self) -> None:
        """Reports that a call ran no graph, and has the model compiled anew."""
        engine = self.engine
        if compat.fx_tracing():  # no real call: torch.fx makes another program
            engine.record.calls -= 1
            engine.record.note(TRACED)
            return
        hidden, program = compat.hides_calls(), self._code.program
        if not hidden and program is not None and program.computes_nothing:
            engine.record.calls -= 1  # `self.encoder.get_num_params()`
            return
        engine.record.aside += 1
        said = ran_nothing(self.method.name, self._code)
        if program is not None:
            program.stepped_aside = True
        if hidden:
            self._code.start_afresh()
        else:
            self._in_vain += 1
            self._code.start_afresh()
            # At the recompile limit we go on, because existing graphs still run.
            if self._in_vain >= _MOST_IN_VAIN and not self._code.has_many:
                self._by_autocast = "Dynamo captured nothing"
        if engine.options.strict:
            raise CaptureError(f"{engine.record.label}: {said}")
        engine.record.note(said)

    def inlined(
        self,
        entry: Callable[..., Any],
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: Method | None = None,
    ) -> Any:
        """Makes a call that Dynamo traces as part of a larger graph.

        In the graph of a converted parent, the parent decides.  In a compilation of the
        user's own, the graph is broken here, and the model's graphs are rewritten, then
        compiled by the user's backend.  Where the graph must not be broken
        (`fullgraph=True`), our pass never runs, and autocast stands in for the pass.
        """
        if not under_compilation():  # reached from code that was compiled before
            return self.of(method)(model, args, kwargs)
        if traced_for_us():
            return entry(model, *args, **kwargs)
        backend = users_backend()
        if backend == RUNS_OUR_PASS:
            return entry(model, *args, **kwargs)
        if backend != ONE_GRAPH:
            return apart(self, backend, model, args, kwargs, method=method)
        return under_autocast(model, entry, unscaled_dtype(self.low), args, kwargs)
