"""The process that compiles apart, of a torch that lacks one name.

`python -m tests.conformance.apart_without FILE`; the environment variable `TAKEN_AWAY`
names a key of `ABSENT`.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.config
from torch._functorch import _aot_autograd
from torch._functorch._aot_autograd import graph_compile  # noqa: F401 (`_of` finds it)

VARIABLE = "TAKEN_AWAY"


class Without:
    """A module without some of its names."""

    def __init__(self, module: Any, *names: str) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise AttributeError(f"this torch has no {name!r}")
        return getattr(self._module, name)


def _of(owner: Any, module: str, *names: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Takes names of a module away, for those that ask `owner` for the module."""

    def take(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, module, Without(getattr(owner, module), *names))

    return take


def _gone(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Takes a function, or a module that was imported, away."""

    def take(patch: pytest.MonkeyPatch) -> None:
        if f"{owner.__name__}.{name}" in sys.modules:
            patch.setitem(sys.modules, f"{owner.__name__}.{name}", None)
        patch.delattr(owner, name)

    return take


def _lock(patch: pytest.MonkeyPatch) -> None:
    """Takes Dynamo's lock away, which Dynamo itself goes on to use."""

    def without(owner: Any, name: str, *default: Any) -> Any:
        return default[0] if name == "compile_lock" else getattr(owner, name, *default)

    patch.setattr("autoamp.compat.dynamo.frames.getattr", without, raising=False)


def _lazy_backward(patch: pytest.MonkeyPatch) -> None:
    """Takes a setting away, which AOT autograd itself goes on to read."""
    name = "force_non_lazy_backward_lowering"

    def without(owner: Any, asked: str) -> bool:
        return asked != name and hasattr(owner, asked)

    patch.setattr("autoamp.compat.apart.hasattr", without, raising=False)


def _no_kernel(patch: pytest.MonkeyPatch) -> None:
    """Inductor raises."""

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no compiler is here")

    patch.setattr("autoamp.compat.apart.compile_with", fails)


def _nothing_counted(patch: pytest.MonkeyPatch) -> None:
    """Another torch counts what its cache holds under other names."""
    patch.setattr(torch._dynamo.utils, "counters", defaultdict(_Zeros))


class _Zeros(Counter[str]):
    def __getitem__(self, key: str) -> int:
        return 0


ABSENT: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    "_is_default": _of(torch._inductor, "config", "_is_default"),
    "get_config_copy": _of(torch._inductor, "config", "get_config_copy"),
    "counters": _gone(torch._dynamo.utils, "counters"),
    "fxgraph_cache_hit": _nothing_counted,
    "graph_compile": _gone(_aot_autograd, "graph_compile"),
    "collect_bw_donated_buffer_idxs": _of(
        _aot_autograd, "graph_compile", "collect_bw_donated_buffer_idxs"
    ),
    "cache_key_tag": _of(torch.compiler, "config", "cache_key_tag"),
    "force_non_lazy_backward_lowering": _lazy_backward,
    "compile_lock": _lock,
    "compile_with": _no_kernel,
}
"""What `compat/apart.py` asks torch for, and how it is taken away."""


if __name__ == "__main__":
    ABSENT[os.environ[VARIABLE]](pytest.MonkeyPatch())
    runpy.run_module("autoamp.compat.apart_main", run_name="__main__", alter_sys=True)
