"""Engines of other libraries that own a model's precision: DeepSpeed's and Megatron's.

Such an engine casts the weights, scales the loss and steps master weights by itself, so
autoamp must do none of these a second time.  The engines are known by the names and
packages of their classes, and are never imported.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple

from torch import nn

from autoamp import compat
from autoamp.messages import printable_line


class _Library(NamedTuple):
    """A library with an engine.

    Attributes:
        name: its name in messages.
        packages: its top packages.
        engines: names of classes; what derives from one of them is an engine.
        optimizers: the same for optimizers, which may be no `torch.optim.Optimizer`.
        settings: what the user sets for low precision.
    """

    name: str
    packages: frozenset[str]
    engines: frozenset[str]
    optimizers: frozenset[str]
    settings: str


_LIBRARIES = (
    _Library(
        "DeepSpeed",
        frozenset({"deepspeed"}),
        frozenset({"DeepSpeedEngine", "InferenceEngine"}),
        frozenset(
            {
                "DeepSpeedOptimizer",
                "ZeROOptimizer",
                # These had no common base before DeepSpeed 0.7.
                "DeepSpeedZeroOptimizer",
                "FP16_Optimizer",
                "FP16_UnfusedOptimizer",
            }
        ),
        'set "bf16" or "fp16" in the configuration of DeepSpeed',
    ),
    _Library(
        "Megatron",
        frozenset({"megatron", "megatron_fsdp"}),
        # `Float16Module` and Megatron's `DistributedDataParallel` are `MegatronModule`s
        # in most versions, but not in all.
        frozenset(
            {
                "MegatronModule",
                "Float16Module",
                "DistributedDataParallel",
                "MegatronFSDP",
            }
        ),
        frozenset({"MegatronOptimizer"}),
        "pass --bf16 or --fp16 to Megatron",
    ),
)

_DEEPEST = 16
"""How many frames are searched for the engine that takes a step."""


def engine_of(model: nn.Module, *, around: bool) -> str:
    """Why `model` is left to another library's engine, with what to do, or "".

    A model is left alone if it is an engine or if an engine is inside it.

    Args:
        around: whether it is also left alone if it is inside an engine.
    """
    if not _loaded():
        return ""
    kinds = (type(module) for module in compat.modules_of(model))
    inside = next((_why_left(k) for k in kinds if _engine_of(k) is not None), "")
    return inside or (engine_around(model) if around else "")


def engine_around(module: nn.Module) -> str:
    """The same for a module that is inside an engine of this process, or "".

    The engine is searched for among all objects, because a module does not know what
    holds it.  That takes a tenth of a second for a million objects, and is done once
    for a module, in a process that has imported the engine's library.
    """
    if not _loaded():
        return ""
    # `isinstance` would ask the object, and a lazy object might be made by that.
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    for engine in [each for each in modules if _engine_of(type(each)) is not None]:
        if any(each is module for each in compat.modules_of(engine)):
            return _why_left(type(engine))
    return ""


def _why_left(kind: type) -> str:
    """One sentence on an engine, or an optimizer of one, which is left alone."""
    library = _engine_of(kind) or _optimizer_of(kind)
    if library is None:
        return ""
    label = printable_line(kind.__name__, 100)
    return (
        f"{library.name}'s {label}, with the modules inside it, is left alone: "
        f"{library.name} chooses the precision, scales the loss and keeps the master "
        f"weights itself. For low precision {library.settings}, and leave autoamp off; "
        "or train without that engine and let autoamp do so"
    )


def engine_of_optimizer(optimizer: object) -> str:
    """Why an optimizer, or one that it wraps, is left to the engine it is of, or ""."""
    # Wrappers may hold each other.
    seen: set[int] = set()
    while _loaded() and optimizer is not None and id(optimizer) not in seen:
        if _optimizer_of(type(optimizer)) is not None:
            return _why_left(type(optimizer))
        seen.add(id(optimizer))
        # The name under which accelerate's wrapper holds it.
        optimizer = getattr(optimizer, "__dict__", {}).get("optimizer")
    return ""


def engine_stepping() -> str:
    """Why the step on Python's stack is left to the engine that takes it, or ""."""
    if not _loaded():
        return ""
    for _, owner in compat.callers(_DEEPEST):
        kind = type(owner)
        if _engine_of(kind) is not None or _optimizer_of(kind) is not None:
            return _why_left(kind)
    return ""


def is_of_an_engine(function: Any) -> bool:
    """Whether a function is written in a package that has an engine."""
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    return any(package in library.packages for library in _LIBRARIES)


def _loaded() -> bool:
    return any(name in sys.modules for each in _LIBRARIES for name in each.packages)


def _engine_of(kind: type) -> _Library | None:
    """The library of which `kind` is an engine."""
    return next((each for each in _LIBRARIES if _has(kind, each, each.engines)), None)


def _optimizer_of(kind: type) -> _Library | None:
    """The library whose engine an optimizer of class `kind` belongs to."""
    libraries = (each for each in _LIBRARIES if _has(kind, each, each.optimizers))
    return next(libraries, None)


def _has(kind: type, library: _Library, names: frozenset[str]) -> bool:
    """Whether `kind` is, or derives from, a class of one of the names in a library."""
    return any(
        base.__name__ in names
        and str(base.__module__).partition(".")[0] in library.packages
        for base in kind.__mro__
    )
