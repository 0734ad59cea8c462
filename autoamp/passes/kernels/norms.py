"""Where a norm or a softmax of our own is called, since torch's is slow or not true."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.passes.functions.norms import OWN_NORMS, softmax
from autoamp.passes.see.nodes import KERNEL

_ATEN = torch.ops.aten


def norm_at(node: fx.Node) -> Any:
    """The function to call at a node: its own target, or a norm of our own."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return node.target
    return own_norm(node, value.dtype, value.device)


def own_norm(node: fx.Node, dtype: torch.dtype, device: torch.device) -> Any:
    """As `norm_at`, at a node whose result has `dtype` on `device`.

    An fp32 layer norm is torch's, which is true.
    """
    if node.target not in OWN_NORMS or device.type != "cpu":
        return node.target
    is_low = dtype in LOW_DTYPES.values()
    if node.target is _ATEN.rms_norm.default:
        # Our kernel sums over the last dimension alone.
        one_dimension = len(node.args[1]) == 1  # type: ignore[arg-type]
        takes_it = one_dimension and (is_low or dtype == HIGH_DTYPE)
    else:
        takes_it = is_low
    return OWN_NORMS[node.target] if takes_it else node.target


_SOFTMAX = torch.ops.aten.softmax.int


def softmax_at(node: fx.Node) -> Any:
    """The function to call at a node: ours for a low softmax that stands for a chain.

    A softmax that the model calls itself is torch's, as it is under autocast.

    Returns:
        The node's own target everywhere else.
    """
    if node.target is not _SOFTMAX or node.meta.get(KERNEL) is None:
        return node.target
    is_low = node.meta["val"].dtype in LOW_DTYPES.values()
    return softmax if is_low else node.target
