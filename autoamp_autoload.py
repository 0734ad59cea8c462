"""Turns autoamp on where `AUTOAMP_ENABLE` asks for it; torch itself calls this.

`autoload` is an entry point of the group `torch.backends`, which torch calls at the end
of `import torch`.  Most processes that import torch never ask for autoamp: of the
package nothing is imported here before it is needed.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from autoamp_said import say

VARIABLE = "AUTOAMP_ENABLE"
ON, OFF = ("1", "true", "on"), ("0", "false", "off")
_NEED_NO_LOOK: dict[str, tuple[str, ...]] = {
    VARIABLE: ON,
    "AUTOAMP_HOT": ON,
    "AUTOAMP_DO_NO_HARM": ON,
    "AUTOAMP_GUARD": (*ON, *OFF),
    "AUTOAMP_MASTERS": ("auto", "split", "fp32", "off"),
    "AUTOAMP_PRECISION": ("auto", "fp16", "bf16"),
    "AUTOAMP_STRICT": (*ON, *OFF),
}
"""Values with which the package is imported no sooner than a module is hot.

Any other value may be wrong, which only the package can tell, or asks it for something.
"""


_armed: list[Callable[[], None]] = []
"""The function that disarms, as long as nothing has been called yet."""


def autoload() -> None:
    """Arms the automatic mode, or does nothing; whatever happens, torch is imported."""
    given = os.environ.get(VARIABLE, "")
    value = given.strip().lower()
    if value in OFF:
        return
    try:
        if not value:
            _say_without_effect()
        elif value in ON:
            _arm()
        else:
            _warn(
                f"{VARIABLE}={given[:80]!r} is neither on ({_listed(ON)}) nor off "
                f"({_listed(OFF)}, or unset)"
            )
    except Exception as error:  # noqa: BLE001 (`import torch` must not break)
        _warn(f"{type(error).__name__}: {error}")


def _say_without_effect() -> None:
    """Says which variables are set for a mode that no variable turns on.

    The first process of a program says it, and none of its workers.
    """
    read = ("AUTOAMP_CACHE_DIR", "AUTOAMP_CALIBRATE")  # `autoamp.convert` reads these
    names = sorted(name for name in _given() if name not in read)
    if names and multiprocessing.parent_process() is None:
        shown = ", ".join(repr(name[:80])[1:-1] for name in names[:5])
        say(
            logging.WARNING,
            f"autoamp: the automatic mode is off in spite of {shown}: {VARIABLE}=1 "
            f"turns the mode on, and {VARIABLE}=0 silences this line",
        )


def disarm() -> None:
    """Undoes `autoload`, where nothing has been called yet."""
    while _armed:
        _armed.pop()()


def _arm() -> None:
    """Waits until a module is hot, or for `torch.compile`, and starts then.

    A process that only imports torch (a DataLoader's worker, say) pays nothing more,
    and one whose modules stay cold pays for their counting alone.
    """
    import torch

    from autoamp.auto.cold import ColdLine
    from autoamp.auto.heat import HOT, Heat
    from autoamp.auto.work import INSIDE, passed_on

    module: Any = torch.nn.Module
    call, compile_ = module.__call__, torch.compile
    is_compiling = torch.compiler.is_dynamo_compiling
    lock = threading.RLock()
    heat = Heat()
    cold = ColdLine(heat, "AUTOAMP_HOT=0")
    # `first_call` and `first_compile` pass calls on to these functions: the mode's, or
    # torch's.  They never pass on to the functions installed by then, which may be
    # somebody's patches that call them.
    beneath: list[Any] = []
    # The package must look at some values before a module is hot.
    at_first_call = any(v not in _NEED_NO_LOOK.get(k, ()) for k, v in _given().items())

    def first_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return call(self, *args, **kwargs)
        work = INSIDE.work
        if work is False:
            return call(self, *args, **kwargs)
        if work is not None:
            return passed_on(call, self, args, kwargs)
        if not beneath and not at_first_call:
            result = heat.call(call, self, args, kwargs)
            if result is not HOT:
                return result
        return start()[0](self, *args, **kwargs)

    def first_compile(*args: Any, **kwargs: Any) -> Any:
        return start()[1](*args, **kwargs)

    def start() -> Any:
        with lock:
            if not beneath:
                _armed.clear()
                beneath[:] = call, compile_  # for calls made meanwhile
                steps.put_back()
                stand_ins = (first_call, call), (first_compile, compile_)
                try:
                    from autoamp.auto.switch import enable_from_environment

                    *installed, steps.on = enable_from_environment(
                        *stand_ins, cold=cold, hook=steps.hook
                    )
                    beneath[:] = installed
                except Exception as error:  # noqa: BLE001 (the script runs on in fp32)
                    _warn(f"{type(error).__name__}: {error}")
                    put_back()
                    steps.hook.remove()
            return beneath

    def stop() -> None:
        with lock:
            beneath[:] = call, compile_
            put_back()
            steps.put_back()
            steps.hook.remove()
            cold.end()

    def put_back() -> None:
        """Puts torch's own back; under somebody's patch ours stays and passes on."""
        if module.__call__ is first_call:
            module.__call__ = call
        if torch.compile is first_compile:
            torch.compile = compile_

    module.__call__, torch.compile = first_call, first_compile
    steps = _Steps(start)
    _armed[:] = [stop]


class _Steps:
    """Starts the automatic mode where half-precision weights are about to be trained.

    Their optimizer gets masters, however cold the modules are.

    Attributes:
        hook: torch's handle of `before`.
        on: what a step is handed to from the start on, or None.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        scaler: Any = torch.amp.GradScaler
        optimizer: Any = torch.optim.Optimizer
        unscale, load = scaler.unscale_, optimizer.load_state_dict

        @functools.wraps(unscale)
        def unscale_(self: Any, of: Any, *args: Any, **kwargs: Any) -> Any:
            meet(of, "before_unscaling")
            return unscale(self, of, *args, **kwargs)

        @functools.wraps(load)
        def load_state_dict(self: Any, saved: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(saved, dict) and "autoamp_masters" in saved:
                meet(self, "take_on")
            return load(self, saved, *args, **kwargs)

        meet, self.start, self.waits, self.on = self.meet, start, True, None
        self._replaced = [
            (scaler, "unscale_", unscale_, unscale),
            (optimizer, "load_state_dict", load_state_dict, load),
        ]
        for owner, name, ours, _ in self._replaced:
            setattr(owner, name, ours)
        self._is_compiling = torch.compiler.is_dynamo_compiling
        self.hook: Any = register_optimizer_step_pre_hook(self.before)

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """The hook before every step."""
        if not self._is_compiling():
            self._look(optimizer)
        return None if self.on is None else self.on(optimizer, args, kwargs)

    def meet(self, optimizer: Any, how: str) -> None:
        """Gives an optimizer its masters before its first step, by `attach.<how>`."""
        if self._look(optimizer):
            attach = sys.modules.get("autoamp.training.attach")
            if attach is not None:
                getattr(attach, how)(optimizer)

    def put_back(self) -> None:
        """Waits no longer.  Under somebody's patch ours stays and passes on."""
        self.waits = False
        for owner, name, ours, original in self._replaced:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)

    def _look(self, optimizer: Any) -> bool:
        """Starts the automatic mode if the optimizer trains half-precision weights."""
        from autoamp.training.half_optimizers import trains_half

        if not (self.waits and trains_half(optimizer)):
            return False
        self.start()
        return True


def _given() -> dict[str, str]:
    """The variables with our prefix that have a value, each with the value."""
    variables = {name: value.strip().lower() for name, value in os.environ.items()}
    return {n: v for n, v in variables.items() if v and f"{n}_".startswith("AUTOAMP_")}


def _warn(problem: str) -> None:
    say(logging.WARNING, f"autoamp is off, everything runs in fp32: {problem}")


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(values)
