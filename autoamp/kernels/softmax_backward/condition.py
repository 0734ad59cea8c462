"""Where a softmax is ours, with gradients as true as those of a written-out chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoamp.analyse.nodes import KERNEL
from autoamp.dtypes import LOW_DTYPES
from autoamp.kernels.softmax_backward.function import softmax

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
