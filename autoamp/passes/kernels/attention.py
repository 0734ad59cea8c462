"""Gives the model's own calls of attention a backward in fp32, on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from autoamp.dtypes import LOW_DTYPES
from autoamp.passes.kernels.causal_mask import ATTENTION


def attention_at(node: fx.Node, own: Callable[..., Any]) -> Any:
    """The function to call at a node: `own` for torch's attention in 16 bits on CPUs.

    Returns:
        The node's own target everywhere else.
    """
    if node.target is not ATTENTION:
        return node.target
    value = node.meta["val"]
    is_low = value.dtype in LOW_DTYPES.values()
    return own if is_low and value.device.type == "cpu" else node.target
