"""Turns autoamp on where `AUTOAMP_ENABLE` asks for it; torch itself calls this.

`autoload` is an entry point of the group `torch.backends`, which torch calls at the end
of `import torch`.  It stands beside the package, not in it: importing any part of
`autoamp` imports all of it, and most processes that import torch never ask for it.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

VARIABLE = "AUTOAMP_ENABLE"
ON, OFF = ("1", "true", "on"), ("0", "false", "off")


def autoload() -> None:
    """Arms the automatic mode, or does nothing; whatever happens, torch is imported."""
    value = os.environ.get(VARIABLE)
    if not value or value.strip().lower() in OFF:
        return
    try:
        if value.strip().lower() in ON:
            _arm()
        else:
            _warn(
                f"{VARIABLE}={value!r} is neither on ({_listed(ON)}) nor off "
                f"({_listed(OFF)}, or unset)"
            )
    except Exception as error:  # noqa: BLE001 (`import torch` must not break)
        _warn(f"{type(error).__name__}: {error}")


def _arm() -> None:
    """Waits for the first call of a module, or of `torch.compile`, and starts then.

    A process that only imports torch (a DataLoader's worker, say) pays nothing more.
    """
    import torch

    module: Any = torch.nn.Module
    call, compile_ = module.__call__, torch.compile
    is_compiling = torch.compiler.is_dynamo_compiling
    lock = threading.RLock()
    dispatch: list[Any] = []

    def first_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return call(self, *args, **kwargs)
        return start()(call, self, args, kwargs)

    def first_compile(*args: Any, **kwargs: Any) -> Any:
        start()
        return (compile_ if torch.compile is first_compile else torch.compile)(
            *args, **kwargs
        )

    def start() -> Any:
        with lock:
            if not dispatch:
                # Where somebody has patched over ours, ours stays and passes on.
                if module.__call__ is first_call:
                    module.__call__ = call
                if torch.compile is first_compile:
                    torch.compile = compile_
                dispatch.append(_started())
            return dispatch[0]

    module.__call__ = first_call
    torch.compile = first_compile


def _started() -> Any:
    """What a call of a module goes through from now on."""
    try:
        from autoamp.auto.mode import dispatch, enable_from_environment

        enable_from_environment()
    except Exception as error:  # noqa: BLE001 (the script runs on in fp32)
        _warn(f"{type(error).__name__}: {error}")
        return _plainly
    return dispatch


def _plainly(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    return call(module, *args, **kwargs)


def _warn(problem: str) -> None:
    logging.getLogger("autoamp").warning(
        "autoamp is off, everything runs in fp32: %s", problem
    )


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(values)
