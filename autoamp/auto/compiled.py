"""Rewrites the graphs of functions that the script compiles itself.

A compiled module does not need this code: it is converted like any other module, and
its call inside the user's compilation goes through graphs that the user's backend
compiles.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from autoamp import compat, foreign
from autoamp.capture.engine import Engine
from autoamp.model.compile_backend import GraphBackend
from autoamp.options import Options
from autoamp.printable import printable_line


class Compiled(Protocol):
    """The part of the automatic mode that a compiled function uses."""

    @property
    def options(self) -> Options:
        """The options in force."""

    @property
    def on(self) -> bool:
        """Whether the mode is still on."""

    @property
    def on_capture(self) -> Callable[[Engine], None] | None:
        """A function called with an engine after every capture, or None."""

    @property
    def backends(self) -> weakref.WeakSet[GraphBackend]:
        """The backends of the functions compiled so far."""


def compiling_with(
    in_force: Callable[[], Compiled | None],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a `torch.compile` that runs the pass before the script's backend.

    Args:
        in_force: gives the mode that is on, or None.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
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
            given: dict[str, Any] = {k: v for k, v in asked.items() if v is not None}
            automatic = in_force()
            if model is None:

                def decorate(function: Any) -> Any:
                    return compile(function, dynamic=dynamic, **given, **others)

                return decorate
            plain = original(model, dynamic=dynamic, **given, **others)
            inner = None
            if automatic is not None and _is_plain(model, backend):
                inner = compat.resolved_backend(backend, mode, options, dynamic)
            if inner is None or automatic is None:
                return plain
            name = printable_line(getattr(model, "__qualname__", type(model).__name__))
            rewriting = GraphBackend(
                automatic.options.compiled_by(inner),
                f"{name}()",
                automatic.on_capture,
            )
            automatic.backends.add(rewriting)
            ours = original(model, backend=rewriting, dynamic=dynamic, **others)
            return _while_on(automatic, ours, plain)

        return compile

    return make


def _while_on(
    mode: Compiled, ours: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """Calls `ours` while the mode is on, and `plain` after that."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs) if mode.on else plain(*args, **kwargs)

    return call


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
        and not foreign.is_part_of_one(model)
        and backend != "autoamp"
        and not isinstance(backend, GraphBackend)
    )
