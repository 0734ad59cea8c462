"""Moves weights that a loader has left in the loader's memory.

`from_pretrained` returns tensors that lie in the buffer a file was read into.  Torch
cannot watch such memory for writes, so low copies of these weights could not be kept.
The weights are therefore moved into memory of torch's own, once.

Only models whose config says that they were loaded are treated so.  Memory that a
program shares with torch (`torch.from_numpy`) looks the same, but a move would cut the
program off from the weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE

_LOADABLE = frozenset({"PreTrainedModel", "ModelMixin"})
"""The base classes, in transformers and in diffusers, that have `from_pretrained`."""


def own_loaded_weights(model: nn.Module) -> int:
    """Moves the loaded weights of `model` into torch's own memory; returns how many.

    The parameters stay the same objects with the same values.
    """
    moved = 0
    for parameter in _loaded_parameters(model):
        if _outside_torch(parameter):
            parameter.data = parameter.data.clone()
            moved += 1
    return moved


def _loaded_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    seen: set[int] = set()
    modules = compat.modules_of(model)
    loadable = {kind for kind in set(map(type, modules)) if _is_loadable(kind)}
    for module in modules if loadable else ():
        if type(module) not in loadable or not _was_loaded(module):
            continue
        for parameter in nn.Module.parameters(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _is_loadable(kind: type) -> bool:
    if not hasattr(kind, "from_pretrained"):  # quick, and true of most modules
        return False
    return not _LOADABLE.isdisjoint(base.__name__ for base in kind.__mro__)


def _was_loaded(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    if isinstance(config, dict):
        return bool(config.get("_name_or_path"))
    return bool(getattr(config, "_name_or_path", ""))


def _outside_torch(parameter: torch.Tensor) -> bool:
    """Whether torch did not allocate the memory, and no other tensor lies in it."""
    return (
        parameter.dtype == HIGH_DTYPE
        and parameter.device.type == "cpu"
        and parameter.layout == torch.strided
        and compat.held_alone(parameter)
        and not compat.is_resizable(parameter)
        and not parameter.is_shared()
    )
