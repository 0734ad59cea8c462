"""Handles each call of a module while the automatic mode is on."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autoamp import compat
from autoamp.auto.cold import ColdLine
from autoamp.auto.environment import Settings
from autoamp.auto.heat import HOT, mode_of
from autoamp.auto.report_dir import Recorder
from autoamp.auto.work import opaque
from autoamp.messages import class_name, log_left_to_autocast, log_once, printable
from autoamp.runtime.called_parts import (
    caller_of,
    capture_part,
    choose,
    inside,
    is_aside,
)
from autoamp.runtime.compile_backend import GraphBackend
from autoamp.runtime.conversion import conversion_of, disown, models_of
from autoamp.runtime.convert import convert_model, revert_model
from autoamp.runtime.eligible import choose_precision, parameters_of
from autoamp.runtime.engine import Engine
from autoamp.runtime.program import disabled
from autoamp.training import foreign_engines
from autoamp.training.attach import guard_half, retire
from autoamp.training.masters import has_half
from autoamp_said import logger_of

logger = logger_of(__name__)

_seen = WeakIdKeyDictionary()
"""The modules that were called in an autocast region of the script's own so far."""


def tell_of_own_autocast(module: nn.Module) -> None:
    """Says why a call of `module` in an autocast region of the script's is left alone.

    Nothing is logged for a module that would not be converted anyway.
    """
    if module in _seen:
        return
    _seen[module] = True
    owner = caller_of(module) or module
    target = inside(owner)
    state = conversion_of(target)
    if state is None:
        choice = choose(owner)
        if choice.target is None or choice.only_if_it_pays:
            return
    elif state.engine is None:  # the model was declined, and a warning has said why
        return
    log_left_to_autocast(logger, class_name(target), of=target)


Call = Callable[..., Any]


@dataclass(slots=True)
class _Known:
    """The decision on one module that is called from outside all other modules.

    Attributes:
        module: a weak reference to the module that is called.
        converted: whether the module, or the module inside a wrapper, was converted.
        transparent: whether a decision is made on each module that the module calls.
        no_model: whether the module, and what it calls, runs in fp32 as it is no model.
        modes: the modes in which the module was hot, and runs its graphs.
        declined: the first weight of a module that could not be converted, and the
            device it was on; None where it was, or where nothing was tried.
    """

    module: weakref.ref[nn.Module]
    converted: bool = False
    transparent: bool = False
    no_model: bool = False
    modes: set[tuple[bool, bool]] = field(default_factory=set)
    declined: tuple[weakref.ref[nn.Parameter], torch.device] | None = None

    def has_moved(self) -> bool:
        """Whether the module was declined on another device than its present one."""
        if self.declined is None:
            return False
        weight, device = self.declined[0](), self.declined[1]
        return weight is None or weight.device != device


def _say_left(module: nn.Module, error: Exception) -> None:
    problem = printable(f"{type(error).__name__}: {error}")
    text = f"autoamp: {class_name(module)} runs in fp32: {problem}"
    log_once(logger, logging.WARNING, text, of=module)


class AutomaticMode:
    """Converts each model when it is hot, and remembers the decision on it."""

    def __init__(self, settings: Settings, cold: ColdLine) -> None:
        self.options = settings.options
        self.cold, self.heat = cold, cold.heat
        self.heat.started = True
        self.heat.everything = not (settings.hot and settings.options.do_no_harm)
        self.on = True
        self.backends: weakref.WeakSet[GraphBackend] = weakref.WeakSet()
        self.recorder = Recorder(settings.report_dir) if settings.report_dir else None
        self.on_capture = self.recorder.write if self.recorder is not None else None
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        # By id, because a module may have no hash; the reference tells whether the id
        # has been given to another module since.
        self._known: dict[int, _Known] = {}
        self._waiting = WeakIdKeyDictionary()
        self._lock = threading.RLock()

    def call(
        self, original: Call, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Makes a call that comes from outside every module that owns weights."""
        known = self._known.get(id(module))
        if known is None or known.module() is not module:
            result = self.heat.call(original, module, args, kwargs)
            if result is not HOT:
                return result
            known = self._decided(module, self._decide)
        elif known.declined is not None and known.has_moved():
            known = self._decided(module, self._decide_again)
        if known is not None and known.transparent:
            return original(module, *args, **kwargs)
        if known is not None and known.no_model:
            original = _in_fp32(original)
        elif known is not None and known.converted:
            if compat.any_autocast():  # the user's own region chooses precisions
                tell_of_own_autocast(module)
                original = _in_fp32(original)
            else:
                # A model that is hot in training is captured for inference only once it
                # is hot there, too.
                mode = mode_of(module)
                if mode not in known.modes:
                    fp32 = _in_fp32(original)
                    if compat.inside_backward():  # a recomputation, as in the forward
                        return fp32(module, *args, **kwargs)
                    result = self.heat.call(fp32, module, args, kwargs)
                    if result is not HOT:
                        return result
                    known.modes.add(mode)
        return opaque(original, module, args, kwargs)

    def revert_all(self) -> None:
        """Reverts every model this mode has converted, and the deep copies of each.

        The rewritten graphs of compiled functions are not called any more.
        """
        # Compiled functions ask this at each call: their rewritten graphs stop here.
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

    def _decided(
        self, module: nn.Module, decide: Callable[[nn.Module], _Known | None]
    ) -> _Known | None:
        """The decision on a module; a module that cannot be inspected is left alone."""
        try:
            return decide(module)
        except Exception as error:  # a script must not fail because of autoamp
            if self.options.strict:
                raise
            _say_left(module, error)
            known = self._known[id(module)] = _Known(self._reference(module))
            return known

    def _reference(self, module: nn.Module) -> weakref.ref[nn.Module]:
        key = id(module)

        def forget(ref: weakref.ref[nn.Module]) -> None:
            known = self._known.get(key)
            if known is not None and known.module is ref:
                del self._known[key]

        return weakref.ref(module, forget)

    def _decide(self, module: nn.Module) -> _Known | None:
        """Decides on a module; None if it is too early to decide."""
        # A region that a backward recomputes must run as in the forward; a call in an
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
            if is_aside(module):
                return None
            owner = caller_of(module)
            root = None
            if owner is not None and self._decide(owner):
                root = self._ours(owner)
            if root is not None and module not in self._waiting:
                # The owner's next call may run `module` in its graphs.  A later call
                # that bypasses our `forward` (in another method, or in a `forward`
                # taken before the conversion) ends the wait.
                self._waiting[module] = True
                return None
            disown(module)
            choice = choose(module)
            if not choice.final:
                passing = _Known(self._reference(module), transparent=True)
                return passing if choice.transparent else None
            if choice.left_to:
                self._leave(module, choice.left_to)
            part = choice.target
            if part is not None and (root is None or not capture_part(part, root)):
                self._convert(part, choice.only_if_it_pays)
            ours = self._ours(module) is not None
            known = _Known(
                self._reference(module), ours, choice.transparent, choice.no_model
            )
            if ours:
                known.modes.add(mode_of(module))
            elif choice.target is not None:
                # Every call of a declined model checks whether the model has moved.
                weight = next(nn.Module.parameters(module), None)
                if weight is not None:
                    known.declined = weakref.ref(weight), weight.device
            self._known[id(module)] = known
            return known

    def _decide_again(self, module: nn.Module) -> _Known | None:
        with self._lock:
            revert_model(inside(module))  # drops the reason why it was declined
            self._known.pop(id(module), None)
        return self._decide(module)

    def _ours(self, module: nn.Module) -> nn.Module | None:
        """The module inside wrappers if this mode has converted it, or None.

        A deep copy of a converted module counts as converted.
        """
        target = inside(module)
        state = conversion_of(target)
        engine = state.engine if state is not None else None
        return target if engine is not None and engine in self._engines else None

    def _leave(self, module: nn.Module, engine: str) -> None:
        """Leaves a module to another library's engine, with all modules inside it.

        A module that was called, and converted, before the engine was made is reverted.
        """
        log_once(logger, logging.INFO, f"autoamp: {engine}")
        for each in compat.modules_of(inside(module)):
            if self._ours(each) is not None:
                revert_model(each)
                self._known.pop(id(each), None)

    def _convert(self, target: nn.Module, only_if_it_pays: bool) -> None:
        """Converts `target`, or logs why it cannot be converted."""
        options = self.options
        if only_if_it_pays:
            options = replace(options, do_no_harm=True)
            low, why_not = choose_precision(target, options)
            if low is None:
                logger.debug("autoamp: %s: %s", class_name(target), why_not)
                return
            # Asked only now: a lone layer is seldom converted, and this is a search.
            if engine := foreign_engines.engine_around(target):
                self._leave(target, engine)
                return
        try:
            told = self.on_capture
            model = convert_model(target, options, automatic=True, on_capture=told)
            state = conversion_of(model)
            is_left = state is None or state.engine is None
            if is_left and has_half(parameters_of(model)):
                # Before its first call: its first step may be skipped, too.
                guard_half(model, options, automatic=True)
        except Exception as error:  # a script must not fail because of autoamp
            if options.strict:
                raise
            _say_left(target, error)
        state = conversion_of(target)
        if state is not None and state.engine is not None:
            self._engines.add(state.engine)


def _in_fp32(original: Call) -> Call:
    """`original`, with all converted models in fp32 during its calls."""

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with disabled():
            return original(module, *args, **kwargs)

    compat.never_a_graph_by_itself(call)
    return call
