"""Moves weights that a loader has left in the loader's memory.

`from_pretrained` returns tensors that lie in the buffer a file was read into.  Torch
cannot watch such memory for writes, so low copies of these weights could not be kept.
The weights are therefore moved into memory of torch's own, once.

Only models whose config says that they were loaded are treated so.  Memory that a
program shares with torch (`torch.from_numpy`) looks the same, but a move would cut the
program off from the weight.
"""

from __future__ import annotations

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
    modules = compat.modules_of(model)
    loadable = {kind for kind in set(map(type, modules)) if _is_loadable(kind)}
    loaded = [m for m in modules if type(m) in loadable and _was_loaded(m)]
    parameters = {id(p): p for m in loaded for p in nn.Module.parameters(m)}
    moved = [p for p in parameters.values() if _outside_torch(p)]
    for parameter in moved:
        parameter.data = parameter.data.clone()
    return len(moved)


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
        and not parameter.untyped_storage().resizable()
        and not parameter.is_shared()
    )
