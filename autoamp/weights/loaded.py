"""Moves weights that a loader has left in memory of its own.

`from_pretrained` hands out tensors that lie in the buffer a file was read into.  Torch
cannot watch such memory for writes, so copies of those weights could never be kept.  So
the weights are moved into memory of torch's own, once.

Only models that say they were loaded are treated so: memory that a program has given to
torch itself, by `torch.from_numpy` say, looks the same, and there a move would take
away the program's way of writing to the weight.
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
    """Moves the loaded weights of `model` into torch's own memory; gives their number.

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
    if not hasattr(kind, "from_pretrained"):  # most modules, and quickly told
        return False
    return not _LOADABLE.isdisjoint(base.__name__ for base in kind.__mro__)


def _was_loaded(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    if isinstance(config, dict):
        return bool(config.get("_name_or_path"))
    return bool(getattr(config, "_name_or_path", ""))


def _outside_torch(parameter: torch.Tensor) -> bool:
    """Whether torch did not allocate the memory, and only this tensor shows it."""
    return (
        parameter.dtype == HIGH_DTYPE
        and parameter.device.type == "cpu"
        and parameter.layout == torch.strided
        and compat.held_alone(parameter)
        and not compat.is_resizable(parameter)
        and not parameter.is_shared()
    )
