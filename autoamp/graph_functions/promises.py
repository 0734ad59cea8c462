"""The dtypes of a call's results, and a cast of results to the dtypes expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

Dtypes = tuple[torch.dtype | None, ...]
"""One dtype for each leaf of a result; None for a leaf that is no tensor."""


def dtypes_in(value: Any) -> Dtypes:
    """The dtype of `value`, or of each of its parts in order."""
    if isinstance(value, torch.Tensor):
        return (value.dtype,)
    return tuple(getattr(each, "dtype", None) for each in pytree.tree_leaves(value))


def with_dtypes(value: Any, dtypes: Sequence[torch.dtype | None]) -> Any:
    """`value`, each tensor in it cast to its dtype of `dtypes`; gradients flow back.

    Args:
        dtypes: as `dtypes_in` gives them, for a value with as many parts.
    """
    parts, structure = pytree.tree_flatten(value)
    cast = [
        part if dtype is None or not isinstance(part, torch.Tensor) else part.to(dtype)
        for part, dtype in zip(parts, dtypes, strict=True)
    ]
    return pytree.tree_unflatten(cast, structure)
