"""Which functions of autoamp's are called in the place of torch's ops.

Each such function gives the same numbers as torch's op, in a truer or a faster way.  A
node goes in; the function to call comes out, which may be the node's own target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autoamp.analyse.nodes import KERNEL
from autoamp.dtypes import LOW_DTYPES
from autoamp.graph_functions import own_kernel, softmax
from autoamp.kernels.masks import ATTENTION

_SOFTMAX = torch.ops.aten.softmax.int


def attention_at(node: fx.Node, own: Callable[..., Any]) -> Any:
    """`own` for torch's attention in 16 bits on CPUs, whose backward it makes truer."""
    if node.target is not ATTENTION:
        return node.target
    value = node.meta["val"]
    is_low = value.dtype in LOW_DTYPES.values()
    return own if is_low and value.device.type == "cpu" else node.target


def softmax_at(node: fx.Node) -> Any:
    """A softmax with truer gradients where the kernel stands for a chain.

    A softmax that the model calls itself is torch's, as it is under autocast.
    """
    if node.target is not _SOFTMAX or node.meta.get(KERNEL) is None:
        return node.target
    is_low = node.meta["val"].dtype in LOW_DTYPES.values()
    return softmax if is_low else node.target


def norm_at(node: fx.Node) -> Any:
    """A norm of our own on CPUs, where torch's is slow or not true."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return node.target
    return own_kernel(node, value.dtype, value.device)
