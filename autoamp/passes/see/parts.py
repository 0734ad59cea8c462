"""Calls that come to several ops where autocast casts them one by one.

Torch writes some ops as calls of others, and autocast of a device has a rule either for
the op or for those others.  Where it has none for `einsum`, which is so on CPUs, only
the matrix products inside run low: type promotion decides on a multiplication, and an
index of one operand alone is summed as the operand is.  A call stays one op where all
of its parts are products that autocast casts, and is recorded by its parts elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.passes.ops import is_view

SEVERAL: tuple[compat.OpOverload, ...] = (torch.ops.aten.einsum.default,)
"""Ops that may come to several, which differ by the arguments of a call."""


def parts_on(device: str | None) -> Mapping[compat.OpOverload, Callable[..., Any]]:
    """For each op of `SEVERAL`, a function that records a call by its parts.

    Args:
        device: the type of the device that the graph is to run on; None for the device
            of the operands.
    """
    return {op: functools.partial(_recorded, op, device) for op in SEVERAL}


def _recorded(
    op: compat.OpOverload, device: str | None, *args: Any, **kwargs: Any
) -> Any:
    """The result of a call that is recorded by its parts; else `NotImplemented`."""
    operands = (v for v in pytree.tree_leaves(args) if isinstance(v, torch.Tensor))
    here = device or next(operands).device.type
    if compat.has_autocast_rule(op, here):
        return NotImplemented
    mark = compat.recorded_so_far()
    # A mode of the tracer's looks at each call of a function, and would record this one
    # as it is. Torch's own kernel makes the parts, in torch's own order.
    result = compat.without_torch_function(op.decompose)(*args, **kwargs)
    ruled = {
        compat.has_autocast_rule(node.target, here)
        for node in compat.recorded_since(mark)
        if isinstance(node.meta.get("val"), torch.Tensor) and not is_view(node.target)
    }
    if ruled != {True}:
        return result
    compat.forget_since(mark)
    return NotImplemented
