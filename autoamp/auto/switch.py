"""`enable` and `disable` switch the automatic mode of this process on and off."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.auto import environment, stderr
from autoamp.auto.clipping import tolerating
from autoamp.auto.compiled import compiling_with
from autoamp.auto.environment import Settings
from autoamp.auto.mode import AutomaticMode
from autoamp.auto.patch import Patch
from autoamp.capture.thread import inside_a_call, under_compilation
from autoamp.options import Options
from autoamp.snapshot.files import checked as recorded_to
from autoamp.training.first_step import expect_models
from autoamp_heat import INSIDE, Heat, passed_on

logger = logging.getLogger(__name__)

Call = Callable[..., Any]

_mode: AutomaticMode | None = None
_patches: list[Patch] = []
_switch = threading.RLock()


def enable(
    *, report_dir: str | Path | None = None, hot: bool = True, **options: Any
) -> None:
    """Converts every model of this process from now on, once the model is hot.

    `AUTOAMP_ENABLE=1` does the same.  Optimizers are found at their first step.  A
    second call reverts the models that were converted so far; its options apply to
    models that are called afterwards.

    Args:
        report_dir: the directory to which captured graphs and reports are written.
        hot: whether a model is captured only when its calls are worth a capture.  False
            captures each model at its first call, and so does `do_no_harm=False`.
        **options: as for `convert`.

    Raises:
        AutoampError: an option cannot be used; nothing was changed.
    """
    folder = environment.writable(str(report_dir)) if report_dir is not None else None
    chosen = Options().replace(**options)
    if chosen.record is not None:
        recorded_to(chosen.record)
    if chosen.keep:
        chosen = dataclasses.replace(chosen, unmet=set(chosen.keep))
    _start(Settings(chosen, folder, hot), Heat())


def enable_from_environment(
    *stand_ins: tuple[Any, Any], heat: Heat | None = None
) -> list[Any]:
    """`enable` with the settings in the environment variables.

    Args:
        *stand_ins: the functions that replace `nn.Module.__call__` and `torch.compile`
            until now, each with the original.
        heat: the counts of the calls so far.

    Returns:
        The functions that replace these two from now on.

    Raises:
        AutoampError: a variable is unusable; nothing was changed.
    """
    settings = environment.read(os.environ)
    _start(settings, heat or Heat(), *stand_ins)
    for sentence in environment.remarks(os.environ):
        logger.warning("autoamp: %s", sentence)
    return [patch.ours for patch in _patches[: len(stand_ins)]]


def disable() -> None:
    """Undoes `enable`: reverts models and optimizers, and converts no more models.

    The call has no effect if the automatic mode is off.
    """
    global _mode
    _disarm()
    with _switch:
        mode, _mode = _mode, None
        while _patches:
            _patches.pop().undo()
        stderr.fall_silent()
        expect_models(False)
    if mode is not None:
        _tell_of_unmet(mode)
        mode.revert_all()


def _tell_of_unmet(mode: AutomaticMode) -> None:
    """Warns of patterns of `keep=` that have matched no module of any model."""
    unmet = mode.options.unmet
    for pattern in sorted(unmet or ()):
        logger.warning(
            "autoamp: keep=%r fitted no module of any model that was converted", pattern
        )
    if unmet:
        unmet.clear()


@atexit.register
def _at_exit() -> None:
    if _mode is not None:
        _tell_of_unmet(_mode)


def _disarm() -> None:
    """Undoes `autoamp_autoload.autoload`, if `import torch` has called it.

    `autoamp_autoload` is looked up and not imported, because it stands above this
    package and imports it.
    """
    above: Any = sys.modules.get("autoamp_autoload")
    if above is not None:
        above.disarm()


def _start(
    settings: Settings,
    heat: Heat,
    call: tuple[Any, Any] | None = None,
    compile_: tuple[Any, Any] | None = None,
) -> None:
    global _mode
    _disarm()
    with _switch:
        before, _mode = _mode, AutomaticMode(settings, heat)
        if not _patches:
            stderr.speak_up()
            expect_models(True)
            _patches.append(Patch(nn.Module, "__call__", _watching, call))
            compiling = compiling_with(lambda: _mode)
            _patches.append(Patch(torch, "compile", compiling, compile_))
            _patches.append(Patch(*compat.TOTAL_NORM, tolerating))
            if hasattr(torch.nn.utils, "get_total_norm"):
                _patches.append(Patch(torch.nn.utils, "get_total_norm", tolerating))
    if before is not None:
        _tell_of_unmet(before)
        before.revert_all()


def _watching(original: Call) -> Call:
    """The function that takes the place of `nn.Module.__call__`."""

    def __call__(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if under_compilation():
            return original(self, *args, **kwargs)
        work = INSIDE.work
        if work is False:
            return original(self, *args, **kwargs)
        if work is not None:
            return passed_on(original, self, args, kwargs)
        if inside_a_call():
            return original(self, *args, **kwargs)
        mode = _mode
        if mode is None:
            return original(self, *args, **kwargs)
        return mode.call(original, self, args, kwargs)

    # After a graph break every module is called through these functions, but each
    # module must have a recompile limit of its own.
    for each in (__call__, passed_on, Heat.call, Heat.counted, AutomaticMode.call):
        compat.never_a_graph_by_itself(each)
    return __call__
