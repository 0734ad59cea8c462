"""Turns autoamp on where `AUTOAMP_ENABLE` asks for it; torch itself calls this.

`autoload` is an entry point of the group `torch.backends`, which torch calls at the end
of `import torch`.  It stands beside the package, not in it: importing any part of
`autoamp` imports all of it, and most processes that import torch never ask for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

VARIABLE = "AUTOAMP_ENABLE"
ON, OFF = ("1", "true", "on"), ("0", "false", "off")


_armed: list[Callable[[], None]] = []
"""What disarms, while nothing has been called yet."""


def autoload() -> None:
    """Arms the automatic mode, or does nothing; whatever happens, torch is imported."""
    given = os.environ.get(VARIABLE, "")
    value = given.strip().lower()
    if not value or value in OFF:
        return
    try:
        if value in ON:
            _arm()
        else:
            _warn(
                f"{VARIABLE}={given[:80]!r} is neither on ({_listed(ON)}) nor off "
                f"({_listed(OFF)}, or unset)"
            )
    except Exception as error:  # noqa: BLE001 (`import torch` must not break)
        _warn(f"{type(error).__name__}: {error}")


def disarm() -> None:
    """Undoes `autoload`, where nothing has been called yet."""
    while _armed:
        _armed.pop()()


def _arm() -> None:
    """Waits for the first call of a module, or of `torch.compile`, and starts then.

    A process that only imports torch (a DataLoader's worker, say) pays nothing more.
    """
    import torch

    module: Any = torch.nn.Module
    call, compile_ = module.__call__, torch.compile
    is_compiling = torch.compiler.is_dynamo_compiling
    lock = threading.RLock()
    # What ours pass on to: the mode's own, over torch's.  Never what is installed by
    # then: that may be somebody's patch that calls ours.
    beneath: list[Any] = []

    def first_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return call(self, *args, **kwargs)
        return start()[0](self, *args, **kwargs)

    def first_compile(*args: Any, **kwargs: Any) -> Any:
        return start()[1](*args, **kwargs)

    def start() -> Any:
        with lock:
            if not beneath:
                _armed.clear()
                beneath[:] = call, compile_  # for what is called meanwhile
                try:
                    beneath[:] = _started((first_call, call), (first_compile, compile_))
                except Exception as error:  # noqa: BLE001 (the script runs on in fp32)
                    _warn(f"{type(error).__name__}: {error}")
                    put_back()
            return beneath

    def stop() -> None:
        with lock:
            beneath[:] = call, compile_
            put_back()

    def put_back() -> None:
        """Where somebody has patched over ours, ours stays and passes on."""
        if module.__call__ is first_call:
            module.__call__ = call
        if torch.compile is first_compile:
            torch.compile = compile_

    module.__call__, torch.compile = first_call, first_compile
    _armed[:] = [stop]


def _started(*stand_ins: Any) -> Any:
    """What a call of a module, and `torch.compile`, go through from now on."""
    from autoamp.auto.switch import enable_from_environment

    return enable_from_environment(*stand_ins)


def _warn(problem: str) -> None:
    # Where stderr is closed, logging itself raises.
    with contextlib.suppress(OSError, ValueError):
        logging.getLogger("autoamp").warning(
            "autoamp is off, everything runs in fp32: %s", problem
        )


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(values)
