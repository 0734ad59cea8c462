"""`enable` and `disable`: which functions of torch the automatic mode replaces."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from autoamp import compat
from autoamp.auto import environment
from autoamp.auto.cold import ColdLine
from autoamp.auto.environment import Settings
from autoamp.auto.heat import Heat
from autoamp.auto.mode import AutomaticMode
from autoamp.auto.work import INSIDE, passed_on
from autoamp.messages import printable_line
from autoamp.passes.options import switch
from autoamp.runtime.compile_backend import GraphBackend
from autoamp.runtime.program import inside_a_call, under_compilation
from autoamp.training import foreign_engines
from autoamp.training.attach import (
    after_update,
    before_unscaling,
    expect_models,
    take_on,
)
from autoamp.training.ledger import BACKWARDS
from autoamp.training.options import ConvertOptions, Options
from autoamp.training.saved_masters import KEY as MASTERS_KEY
from autoamp_said import Lines, logger_of

logger = logger_of(__name__)

_PACKAGE = logger_of("autoamp")

_level_was_unset: list[bool] = []
"""Whether nobody had set a level, where our lines are shown now."""


def speak_up() -> None:
    """Shows messages of level INFO, unless the script has set another level.

    A script that was never changed does not know our logger.  One that sets up its own
    logging gets every line that its handlers take there, once.
    """
    if not Lines.speaks:
        Lines.speaks = True
        _level_was_unset[:] = [_PACKAGE.level == logging.NOTSET]
        if _level_was_unset[0]:
            _PACKAGE.setLevel(logging.INFO)


def fall_silent() -> None:
    """Undoes `speak_up`."""
    Lines.speaks = False
    if _level_was_unset and _level_was_unset.pop() and _PACKAGE.level == logging.INFO:
        _PACKAGE.setLevel(logging.NOTSET)


class Patch:
    """Replaces `owner.name` by `make(original)`, until `undo`.

    Args:
        stand_in: a function that has replaced the attribute before, and the original.
            The function is replaced by ours; if other code has patched over it, it
            stays, and calls `ours` itself.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        make: Callable[[Callable[..., Any]], Any],
        stand_in: tuple[Any, Any] | None = None,
    ) -> None:
        self.owner, self.name = owner, name
        replaced, self.original = stand_in or (getattr(owner, name),) * 2
        self.ours = make(self.original)
        if getattr(owner, name) is replaced:
            setattr(owner, name, self.ours)

    def undo(self) -> None:
        """Restores the original, unless other code has patched over ours."""
        if getattr(self.owner, self.name) is self.ours:
            setattr(self.owner, self.name, self.original)


Norm = Callable[..., Any]


def tolerating(original: Norm) -> Norm:
    """`torch.nn.utils.get_total_norm`, without its error for a step that is skipped.

    No error is raised if a backward behind the gradients has overflowed under its loss
    scale since the last step.  A loss that is not finite in itself is an error, as in
    fp32.
    """

    def total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        single = isinstance(tensors, torch.Tensor)
        tensors = [tensors] if single else list(tensors)  # iterated over twice
        try:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        except RuntimeError:
            if not error_if_nonfinite or not BACKWARDS.any_overflowed(tensors):
                raise
        return original(tensors, norm_type, False, foreach)

    return total_norm


def unscaling(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GradScaler.unscale_`, which refuses gradients in fp16: masters' are fp32."""

    @functools.wraps(original)
    def unscale_(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled() and isinstance(optimizer, torch.optim.Optimizer):
            before_unscaling(optimizer)
        return original(self, optimizer, *args, **kwargs)

    return unscale_


def updating(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GradScaler.update`, after which gradients have the dtype that ranks reduce."""

    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        after_update()
        return original(self, *args, **kwargs)

    return update


def loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Optimizer.load_state_dict`, before which saved masters have a place to go."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state_dict, dict) and state_dict.get(MASTERS_KEY):
            take_on(self)
        return original(self, state_dict, *args, **kwargs)

    return load_state_dict


def compiling(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `torch.compile` that runs the pass before the script's backend.

    A compiled module does not need this code: it is converted like any other module,
    and its call inside the user's compilation goes through graphs that the user's
    backend compiles.
    """

    @functools.wraps(original)
    def compile(  # noqa: A001 (torch's own name)
        model: Any = None,
        *,
        backend: Any = None,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        dynamic: bool | None = None,
        **others: Any,
    ) -> Any:
        asked = {"backend": backend, "mode": mode, "options": options}
        keywords: dict[str, Any] = {k: v for k, v in asked.items() if v is not None}
        keywords |= {"dynamic": dynamic, **others}
        if model is None:
            return lambda function: compile(function, **keywords)
        plain, automatic = original(model, **keywords), _mode
        if automatic is None or not _is_plain(model, backend):
            return plain
        inner = compat.resolved_backend(backend, mode, options, dynamic)
        if inner is None:
            return plain
        name = printable_line(getattr(model, "__qualname__", type(model).__name__))
        chosen = automatic.options.compiled_by(inner)
        rewriting = GraphBackend(chosen, f"{name}()", automatic.on_capture)
        automatic.backends.add(rewriting)
        ours = original(model, backend=rewriting, dynamic=dynamic, **others)

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (ours if automatic.on else plain)(*args, **kwargs)

        return call

    return compile


def _is_plain(model: Any, backend: Any) -> bool:
    """Whether `model` is a function of the script's own, and `backend` is not ours.

    A module does not count, and neither does the bound method `_call_impl`, which
    `Module.compile` hands to `torch.compile`; nor does a function of a library whose
    engine owns the precision.
    """
    owner = getattr(model, "__self__", None)
    return (
        callable(model)
        and not isinstance(model, nn.Module)
        and not (isinstance(owner, nn.Module) and model.__name__ == "_call_impl")
        and not foreign_engines.is_of_an_engine(model)
        and backend != "autoamp"
        and not isinstance(backend, GraphBackend)
    )


Call = Callable[..., Any]

_mode: AutomaticMode | None = None
_patches: list[Patch] = []
_switch = threading.RLock()


def enable(
    *,
    report_dir: str | Path | None = None,
    hot: bool = True,
    **options: Unpack[ConvertOptions],
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
    switch("hot", hot)
    folder = environment.writable(str(report_dir)) if report_dir is not None else None
    chosen = Options().replace(**options)
    if chosen.keep:
        # A pattern need not fit the first model of a process: what has fitted none is
        # told at the end.
        chosen = dataclasses.replace(chosen, unmet=set(chosen.keep))
    _start(Settings(chosen, folder, hot), ColdLine(Heat(), "autoamp.enable(hot=False)"))


def enable_from_environment(
    *stand_ins: tuple[Any, Any], cold: ColdLine | None = None, hook: Any = None
) -> list[Any]:
    """`enable` with the settings in the environment variables.

    Args:
        *stand_ins: the functions that replace `nn.Module.__call__` and `torch.compile`
            until now, each with the original.
        cold: the line on a model that is not hot, with the counts of the calls so far.
        hook: as for `expect_models`.

    Returns:
        The functions that replace these two from now on, and that for `hook`.

    Raises:
        AutoampError: a variable is unusable; nothing was changed.
    """
    settings = environment.read(os.environ)
    cold = cold or ColdLine(Heat(), "AUTOAMP_HOT=0")
    before_step = _start(settings, cold, *stand_ins, hook=hook)
    for sentence in environment.remarks(os.environ):
        logger.warning("autoamp: %s", sentence)
    return [*(patch.ours for patch in _patches[: len(stand_ins)]), before_step]


def is_enabled() -> bool:
    """Whether the automatic mode is on."""
    return _mode is not None


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
        fall_silent()
        expect_models(None)
    if mode is not None:
        _tell_of_unmet(mode)
        mode.cold.end()
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
    """Undoes `autoamp_autoload.autoload`, if `import torch` has called it."""
    # It is looked up and not imported: it stands above this package and imports it.
    above: Any = sys.modules.get("autoamp_autoload")
    if above is not None:
        above.disarm()


def _start(
    settings: Settings,
    cold: ColdLine,
    call: tuple[Any, Any] | None = None,
    compile_: tuple[Any, Any] | None = None,
    *,
    hook: Any = None,
) -> Any:
    global _mode
    _disarm()
    with _switch:
        before, _mode = _mode, AutomaticMode(settings, cold)
        if not _patches:
            speak_up()
            _patches.append(Patch(nn.Module, "__call__", _watching, call))
            _patches.append(Patch(torch, "compile", compiling, compile_))
            _patches.append(Patch(*compat.TOTAL_NORM, tolerating))
            # `clip_grad_norm_` calls the private name, and scripts the public one.
            _patches.append(Patch(torch.nn.utils, "get_total_norm", tolerating))
            _patches.append(Patch(torch.amp.GradScaler, "unscale_", unscaling))
            _patches.append(Patch(torch.amp.GradScaler, "update", updating))
            _patches.append(Patch(torch.optim.Optimizer, "load_state_dict", loading))
        before_step = expect_models(settings.options, hook)
    if before is not None:
        _tell_of_unmet(before)
        before.cold.end()
        before.revert_all()
    return before_step


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
