"""The automatic mode: `enable`, `disable`, and what a call of a module goes through."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autoamp_autoload
from autoamp import compat
from autoamp.auto import environment, stderr
from autoamp.auto.candidates import choose, inside
from autoamp.auto.compiled import compiling_with
from autoamp.auto.environment import Settings
from autoamp.auto.patch import Patch
from autoamp.auto.record import Recorder
from autoamp.errors import AutoampError, OptionError
from autoamp.options import Options
from autoamp.runtime.attach import retire
from autoamp.runtime.calls import disabled, under_compilation
from autoamp.runtime.convert import (
    conversion_of,
    convert_model,
    models_of,
    revert_model,
)
from autoamp.runtime.eligible import choose_precision
from autoamp.runtime.engine import Engine
from autoamp.runtime.graph_backend import GraphBackend

logger = logging.getLogger(__name__)

Call = Callable[..., Any]


class _ThisThread(threading.local):
    """`inside`: a module that owns weights is being called."""

    inside = False


_thread = _ThisThread()


class _Known:
    """What was decided of one module that is called from outside.

    Attributes:
        module: whose calls come in.
        target: what was converted for it; None where nothing was.
        engine: of that conversion.
        transparent: what the module calls is looked at in turn.
        lone: it is a single layer, converted only as far as it pays.
        graphs: how many had been captured when last looked at; -1 before that.
    """

    __slots__ = ("engine", "graphs", "lone", "module", "target", "transparent")

    def __init__(
        self,
        module: weakref.ref[nn.Module],
        target: nn.Module | None = None,
        transparent: bool = False,
        lone: bool = False,
    ) -> None:
        state = conversion_of(target)
        self.module = module
        self.target = weakref.ref(target) if target is not None else None
        self.engine: Engine | None = state.engine if state is not None else None
        self.transparent = transparent
        self.lone = lone
        self.graphs = -1


class AutomaticMode:
    """Converts each model at its first call, and remembers which it did."""

    def __init__(self, settings: Settings) -> None:
        self.options = settings.options
        self.on = True
        self.backends: weakref.WeakSet[GraphBackend] = weakref.WeakSet()
        self.recorder = Recorder(settings.report_dir) if settings.report_dir else None
        self.on_capture = self.recorder.write if self.recorder is not None else None
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._known: dict[int, _Known] = {}
        self._lock = threading.RLock()

    def call(
        self, original: Call, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """`original(module, ...)`, where nothing that owns weights is being called."""
        known = self._known.get(id(module))
        if known is None or known.module() is not module:
            known = self._meet(module)
        if known is not None and known.transparent:
            return original(module, *args, **kwargs)
        _thread.inside = True
        try:
            if known is None or known.engine is None:
                return original(module, *args, **kwargs)
            if compat.any_autocast():  # the user's own region: left to it
                with disabled():
                    return original(module, *args, **kwargs)
            result = original(module, *args, **kwargs)
        finally:
            _thread.inside = False
        if known.graphs != len(known.engine.graphs):
            self._look(known)
        return result

    def revert_all(self) -> None:
        """Puts back every model this mode has converted, and their deep copies.

        What functions were compiled to is not called any more.
        """
        self.on = False
        if self.recorder is not None:
            self.recorder.finish()
        with self._lock:
            self._known = {}
            for backend in list(self.backends):
                if backend.engine is not None:
                    retire(backend.engine)
            for engine in list(self._engines):
                for model in models_of(engine):
                    revert_model(model)

    def _meet(self, module: nn.Module) -> _Known | None:
        """Decides what becomes of a module; None where it is too early to say."""
        # A region recomputed by a backward must run as its forward did; one in an
        # autocast region of the user's is that region's.
        if compat.inside_backward() or compat.any_autocast() or compat.hides_calls():
            return None
        with self._lock:
            known = self._known.get(id(module))
            if known is not None and known.module() is module:
                return known
            choice = choose(module)
            if not choice.final:
                return None
            target = choice.target
            if target is not None:
                self._convert(target, choice.only_if_it_pays)
            place = id(module)
            gone = weakref.ref(module, lambda ref: self._forget(place, ref))
            known = _Known(
                gone, self._ours(module), choice.transparent, choice.only_if_it_pays
            )
            self._known[place] = known
            return known

    def _ours(self, module: nn.Module) -> nn.Module | None:
        """What this mode has converted of `module`; also where it is a deep copy."""
        target = inside(module)
        state = conversion_of(target)
        engine = state.engine if state is not None else None
        return target if engine is not None and engine in self._engines else None

    def _forget(self, place: int, ref: weakref.ref[nn.Module]) -> None:
        known = self._known.get(place)
        if known is not None and known.module is ref:
            del self._known[place]

    def _convert(self, target: nn.Module, only_if_it_pays: bool) -> None:
        """Converts `target`; where it cannot be, why is said."""
        options = self.options
        if only_if_it_pays:
            options = replace(options, do_no_harm=True)
            low, why_not = choose_precision(target, options)
            if low is None:
                logger.debug("autoamp: %s: %s", type(target).__name__, why_not)
                return
        try:
            convert_model(target, options)
        except AutoampError as error:
            if options.strict:
                raise
            logger.warning("autoamp: %s runs in fp32: %s", type(target).__name__, error)
        state = conversion_of(target)
        if state is not None and state.engine is not None:
            self._engines.add(state.engine)

    def _look(self, known: _Known) -> None:
        """Graphs have been captured since the last call."""
        engine = known.engine
        assert engine is not None
        known.graphs = len(engine.graphs)
        if self.recorder is not None:
            self.recorder.write(engine)
        if known.lone and not engine.tally.lowers:
            # It is in fp32 all the same: then without what its graph costs.
            target = known.target() if known.target is not None else None
            if target is not None:
                revert_model(target)
            known.engine = None


_mode: AutomaticMode | None = None
_patches: list[Patch] = []
_switch = threading.RLock()


def dispatch(
    original: Call, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    """A call of a module: converted first, where it is a model met for the first time.

    Args:
        original: `nn.Module.__call__` as it was before.
    """
    mode = _mode
    if mode is None or _thread.inside:
        return original(module, *args, **kwargs)
    return mode.call(original, module, args, kwargs)


def enable(*, report_dir: str | Path | None = None, **options: Any) -> None:
    """Converts every model of this process at its first call, from now on.

    What `AUTOAMP_ENABLE=1` does.  Optimizers are met by themselves.  Called again, the
    new options hold for models met from then on, and those met before are reverted.

    Args:
        report_dir: where each captured graph and report is written.
        **options: as for `convert`.

    Raises:
        AutoampError: an option cannot be used; nothing was changed.
    """
    if "unlist" in options:
        raise OptionError("unknown option 'unlist'")
    place = environment.writable(str(report_dir)) if report_dir is not None else None
    _start(Settings(Options().replace(**options), place))


def enable_from_environment(*stand_ins: tuple[Any, Any]) -> list[Any]:
    """`enable` with what the environment variables say.

    Args:
        *stand_ins: what waits in the place of `nn.Module.__call__` and `torch.compile`,
            each with what was there before.

    Returns:
        What the two are from now on.

    Raises:
        AutoampError: a variable is unusable; nothing was changed.
    """
    settings = environment.read(os.environ)
    _start(settings, *stand_ins)
    for sentence in environment.unknown(os.environ):
        logger.warning("autoamp: %s", sentence)
    return [patch.ours for patch in _patches]


def disable() -> None:
    """Undoes `enable`: models and optimizers are what they were, and new ones stay so.

    Without effect where the automatic mode is off.
    """
    global _mode
    autoamp_autoload.disarm()
    with _switch:
        mode, _mode = _mode, None
        while _patches:
            _patches.pop().undo()
        stderr.fall_silent()
    if mode is not None:
        mode.revert_all()


def _start(
    settings: Settings,
    call: tuple[Any, Any] | None = None,
    compile_: tuple[Any, Any] | None = None,
) -> None:
    global _mode
    autoamp_autoload.disarm()
    with _switch:
        before, _mode = _mode, AutomaticMode(settings)
        if not _patches:
            stderr.speak_up()
            _patches.append(Patch(nn.Module, "__call__", _watching, call))
            compiling = compiling_with(lambda: _mode)
            _patches.append(Patch(torch, "compile", compiling, compile_))
    if before is not None:
        before.revert_all()


def _watching(original: Call) -> Call:
    """What takes the place of `nn.Module.__call__`."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if under_compilation() or _thread.inside:
            return original(self, *args, **kwargs)
        return dispatch(original, self, args, kwargs)

    return __call__
