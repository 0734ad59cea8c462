"""Turns autoamp on where `AUTOAMP_ENABLE` asks for it; torch itself calls this.

`autoload` is an entry point of the group `torch.backends`, which torch calls at the end
of `import torch`.  This module stands beside the package `autoamp`, not in it, because
importing any part of the package imports all of it, and most processes that import
torch never ask for it.
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
"""The function that disarms, as long as nothing has been called yet."""


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
    # `first_call` and `first_compile` pass calls on to these functions: the mode's, or
    # torch's.  They never pass on to the functions installed by then, which may be
    # somebody's patches that call them.
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
                beneath[:] = call, compile_  # for calls made meanwhile
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
        """Puts torch's own back; under somebody's patch ours stays and passes on."""
        if module.__call__ is first_call:
            module.__call__ = call
        if torch.compile is first_compile:
            torch.compile = compile_

    module.__call__, torch.compile = first_call, first_compile
    _armed[:] = [stop]


def _started(*stand_ins: Any) -> Any:
    """Starts the automatic mode; gives its `nn.Module.__call__` and `torch.compile`."""
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
