"""The calls that cross between DTensors and what ranks hold, as the passes see them.

The passes see a graph of DTensors as a graph of whole tensors: a DTensor stands for its
whole tensor, and what a rank holds is a tensor by itself.  `from_local`, `to_local` and
`redistribute` change the shape in between, or nothing; three ops with no data stand for
them (`IN_WHOLE`).  Before the graph runs torch's calls take their places again
(`rewrite/meshes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp import compat

_NAMES = ("from_local", "to_local", "redistribute")
_SCHEMA = "(Tensor self, SymInt[] size, SymInt[] stride) -> Tensor"
_LIBRARIES: list[torch.library.Library] = []
"""Held here, since a library takes its ops away where nobody holds it."""


def _stands_for(value: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    return value.new_empty_strided(size, stride)


def _ops() -> dict[str, Any]:
    library = torch.library.Library("autoamp", "FRAGMENT")
    if not hasattr(torch.ops.autoamp, _NAMES[0]):
        for name in _NAMES:
            library.define(name + _SCHEMA)
            library.impl(name, _stands_for, "CompositeExplicitAutograd")
        _LIBRARIES.append(library)
    return {name: getattr(torch.ops.autoamp, name).default for name in _NAMES}


IN_WHOLE: dict[str, Any] = _ops()
"""The op that stands for each call in a graph of whole tensors.

The op takes the value, and the sizes and strides of the result."""


def from_local(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A DTensor of what this rank holds, as `DTensor.from_local` makes it."""
    return compat.from_local(value, *args, **kwargs)


def to_local(value: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What this rank holds of DTensor `value`, as `DTensor.to_local` gives it."""
    result: Tensor = value.to_local(*args, **kwargs)
    return result


def redistribute(value: Any, *args: Any, **kwargs: Any) -> Tensor:
    """DTensor `value` under other placements, as `DTensor.redistribute` gives it."""
    result: Tensor = value.redistribute(*args, **kwargs)
    return result


def full_tensor(value: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The whole of DTensor `value`, as `DTensor.full_tensor` gives it."""
    result: Tensor = value.full_tensor(*args, **kwargs)
    return result


MESH_CALLS: dict[str, Callable[..., Tensor]] = {
    "from_local": from_local,
    "to_local": to_local,
    "redistribute": redistribute,
    "full_tensor": full_tensor,
}
"""Torch's calls by name, as functions of a graph that runs on DTensors."""
