"""Handles each call of a module while the automatic mode is on."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autoamp import compat
from autoamp.auto.candidates import caller_of, choose, inside
from autoamp.auto.environment import Settings
from autoamp.auto.own_autocast import tell_of_own_autocast
from autoamp.auto.report_dir import Recorder
from autoamp.capture.engine import Engine
from autoamp.capture.locked import check_model
from autoamp.model.call.thread import disabled
from autoamp.model.compile_backend import GraphBackend
from autoamp.model.conversion import conversion_of, disown, models_of
from autoamp.model.convert import convert_model, revert_model
from autoamp.model.eligible import choose_precision
from autoamp.optimizer.meeting import retire
from autoamp.options import Options
from autoamp.plain import class_name, plain
from autoamp.saying import say_once

logger = logging.getLogger(__name__)

Call = Callable[..., Any]


class _ThisThread(threading.local):
    """`inside`: whether this thread is in a call of a module that owns weights."""

    inside = False


THREAD = _ThisThread()


class _Known:
    """The decision on one module that is called from outside any other.

    Attributes:
        module: the module that is called.
        target: the module that was converted for it; None where none was.
        engine: the engine of that conversion, or None.
        transparent: modules that the module calls are looked at in turn.
        lone: the module is a single layer, converted only where that pays.
        declined_on: the device on which the module could not be converted; None where
            it was converted, or was not to be.
        graphs: how many graphs `engine` had when last looked at; -1 before that.
    """

    __slots__ = (
        "declined_on",
        "engine",
        "graphs",
        "lone",
        "module",
        "target",
        "transparent",
    )

    def __init__(
        self,
        module: weakref.ref[nn.Module],
        target: nn.Module | None = None,
        transparent: bool = False,
        lone: bool = False,
        declined_on: torch.device | None = None,
    ) -> None:
        state = conversion_of(target)
        self.module = module
        self.target = weakref.ref(target) if target is not None else None
        self.engine: Engine | None = state.engine if state is not None else None
        self.transparent = transparent
        self.lone = lone
        self.declined_on = declined_on
        self.graphs = -1

    def has_moved(self) -> bool:
        """Whether the module was declined on another device than its present one."""
        if self.declined_on is None:
            return False
        module = self.module()
        return module is not None and _device_of(module) != self.declined_on


def _device_of(module: nn.Module) -> torch.device | None:
    # Every call of a declined model comes here, so no list of parameters is made.
    return next((p.device for p in nn.Module.parameters(module)), None)


def _say_left(module: nn.Module, error: Exception) -> None:
    problem = plain(f"{type(error).__name__}: {error}")
    text = f"autoamp: {class_name(module)} runs in fp32: {problem}"
    say_once(logger, logging.WARNING, text)


def _with_own_lock(options: Options, target: nn.Module) -> Options:
    """`options`, without a lock of another class: a script may have several models."""
    lock, label = options.locked, class_name(target)
    if lock is None or lock.model == label:
        return options
    say_once(logger, logging.INFO, f"autoamp: {check_model(lock, label)}")
    return options.replace(lock=None)


class AutomaticMode:
    """Converts each model at its first call, and remembers the decision on it."""

    def __init__(self, settings: Settings) -> None:
        self.options = settings.options
        self.on = True
        self.backends: weakref.WeakSet[GraphBackend] = weakref.WeakSet()
        self.recorder = Recorder(settings.report_dir) if settings.report_dir else None
        self.on_capture = self.recorder.write if self.recorder is not None else None
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._known: dict[int, _Known] = {}
        self._waiting = WeakIdKeyDictionary()
        self._lock = threading.RLock()

    def call(
        self, original: Call, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Makes a call that comes from outside every module that owns weights."""
        known = self._known.get(id(module))
        if known is None or known.module() is not module:
            known = self._met(module, self._meet)
        elif known.engine is None and known.has_moved():
            known = self._met(module, self._meet_again)
        if known is not None and known.transparent:
            return original(module, *args, **kwargs)
        THREAD.inside = True
        try:
            if known is None or known.engine is None:
                return original(module, *args, **kwargs)
            if compat.any_autocast():  # the user's own region decides
                tell_of_own_autocast(module)
                with disabled():
                    return original(module, *args, **kwargs)
            result = original(module, *args, **kwargs)
        finally:
            THREAD.inside = False
        if known.graphs != len(known.engine.record.graphs):
            self._look(known)
        return result

    def revert_all(self) -> None:
        """Reverts every model this mode has converted, and the deep copies of each.

        The rewritten graphs of compiled functions are not called any more.
        """
        self.on = False
        if self.recorder is not None:
            self.recorder.finish()
        with self._lock:
            self._known = {}
            for backend in list(self.backends):
                if backend.engine is not None:
                    retire(backend.engine.record.scaling)
            for engine in list(self._engines):
                for model in models_of(engine):
                    revert_model(model)
                retire(engine.record.scaling)

    def _met(
        self, module: nn.Module, meet: Callable[[nn.Module], _Known | None]
    ) -> _Known | None:
        """`meet(module)`; a module that cannot even be looked at is left alone."""
        try:
            return meet(module)
        except Exception as error:  # a script must not fail because of autoamp
            if self.options.strict:
                raise
            _say_left(module, error)
            known = self._known[id(module)] = _Known(self._reference(module))
            return known

    def _reference(self, module: nn.Module) -> weakref.ref[nn.Module]:
        key = id(module)
        return weakref.ref(module, lambda ref: self._forget(key, ref))

    def _meet(self, module: nn.Module) -> _Known | None:
        """Decides on a module; None where it is too early to decide."""
        # A region recomputed by a backward must run as its forward did; a call in an
        # autocast region of the user's is left to that region.
        if compat.inside_backward() or compat.hides_calls():
            return None
        if compat.any_autocast():
            tell_of_own_autocast(module)
            return None
        with self._lock:
            known = self._known.get(id(module))
            if known is not None and known.module() is module:
                return known
            if module not in self._waiting:
                owner = caller_of(module)
                if owner is not None and self._meet(owner) and self._ours(owner):
                    # The owner's next call runs `module` in its graphs.  A call that
                    # then still comes past our `forward` (`forward = model.forward`,
                    # taken before) ends the wait.
                    self._waiting[module] = True
                    return None
            disown(module)
            choice = choose(module)
            if not choice.final:
                return None
            if choice.target is not None:
                self._convert(choice.target, choice.only_if_it_pays)
            ours = self._ours(module)
            declined = choice.target is not None and ours is None
            known = _Known(
                self._reference(module),
                ours,
                choice.transparent,
                choice.only_if_it_pays,
                _device_of(module) if declined else None,
            )
            self._known[id(module)] = known
            return known

    def _meet_again(self, module: nn.Module) -> _Known | None:
        with self._lock:
            revert_model(inside(module))  # forgets why it was declined
            self._known.pop(id(module), None)
        return self._meet(module)

    def _ours(self, module: nn.Module) -> nn.Module | None:
        """The module inside wrappers if this mode has converted it, or None.

        A deep copy of a converted module counts as converted.
        """
        target = inside(module)
        state = conversion_of(target)
        engine = state.engine if state is not None else None
        return target if engine is not None and engine in self._engines else None

    def _forget(self, key: int, ref: weakref.ref[nn.Module]) -> None:
        known = self._known.get(key)
        if known is not None and known.module is ref:
            del self._known[key]

    def _convert(self, target: nn.Module, only_if_it_pays: bool) -> None:
        """Converts `target`, or logs why it cannot be converted."""
        options = self.options
        if only_if_it_pays:
            options = replace(options, do_no_harm=True)
            low, why_not = choose_precision(target, options)
            if low is None:
                logger.debug("autoamp: %s: %s", class_name(target), why_not)
                return
        try:
            convert_model(target, _with_own_lock(options, target))
        except Exception as error:  # a script must not fail because of autoamp
            if options.strict:
                raise
            _say_left(target, error)
        state = conversion_of(target)
        if state is not None and state.engine is not None:
            state.engine.record.scaling.automatic = True
            state.engine.on_capture = self.on_capture
            self._engines.add(state.engine)

    def _look(self, known: _Known) -> None:
        """Reverts a lone layer without a low op."""
        engine = known.engine
        assert engine is not None
        known.graphs = len(engine.record.graphs)
        if known.lone and not engine.record.lowers:
            # The layer is in fp32 all the same, so it can save the cost of a graph.
            target = known.target() if known.target is not None else None
            if target is not None:
                revert_model(target)
            known.engine = None
