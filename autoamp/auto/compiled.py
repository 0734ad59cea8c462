"""Functions the script compiles itself: their graphs are rewritten on the way.

A module needs nothing of this: it is converted like any other, and its call, met inside
the user's compilation, goes through graphs that the user's backend compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from autoamp import compat
from autoamp.options import Options
from autoamp.runtime.graph_backend import GraphBackend


def compiling_with(
    options: Callable[[], Options | None],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes of `torch.compile` one that puts the pass before the script's backend.

    Args:
        options: gives those in force, or None where nothing is to be rewritten.
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
            chosen = in_force()
            if model is None:

                def decorate(function: Any) -> Any:
                    return compile(function, dynamic=dynamic, **given, **others)

                return decorate
            inner = None
            if chosen is not None and _is_plain(model, backend):
                inner = compat.resolved_backend(backend, mode, options, dynamic)
            if inner is None or chosen is None:
                return original(model, dynamic=dynamic, **given, **others)
            name = getattr(model, "__qualname__", type(model).__name__)
            rewriting = GraphBackend(chosen.replace(backend=inner), f"{name}()")
            return original(model, backend=rewriting, dynamic=dynamic, **others)

        return compile

    in_force = options
    return make


def _is_plain(model: Any, backend: Any) -> bool:
    """Whether it is a function of the script's own: no module, nor a method of one.

    `Module.compile` gives us the bound method `_call_impl`.
    """
    owner = getattr(model, "__self__", None)
    return (
        callable(model)
        and not isinstance(model, nn.Module)
        and not (isinstance(owner, nn.Module) and model.__name__ == "_call_impl")
        and backend != "autoamp"
    )
