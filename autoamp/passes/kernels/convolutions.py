"""Where our own depthwise convolution is called: where torch's backward is slow."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.passes.functions.convolutions import COLUMNS, OPS, depthwise

_LEAST = 2**18
"""With so many products torch's kernel takes longer than the calls of ours."""

_DEFAULTS: tuple[Any, ...] = (None, [1], [0], [1], 1)
"""The arguments after the weight: bias, stride, padding, dilation and groups."""


def depthwise_at(node: fx.Node) -> Any:
    """The function to call at a node: ours for bf16 filters that oneDNN is slow with.

    Returns:
        The node's own target everywhere else.
    """
    return depthwise if _is_slow(node) else node.target


def _is_slow(node: fx.Node) -> bool:
    if node.target not in OPS or node.kwargs:
        return False
    weight: Any = node.args[1]
    given: Any = (*node.args[2:], *_DEFAULTS[len(node.args) - 2 :])
    _, _, padding, dilation, groups = given
    result, (channels, depth, *sizes) = node.meta["val"], weight.meta["val"].shape
    if result.dtype != torch.bfloat16 or result.dim() != 2 + len(sizes):
        return False  # no low dtype, or one image without a batch
    if not (channels == groups > depth == 1 and {*dilation} == {1}):
        return False
    filters = [*map(compat.hint, sizes)]
    products = math.prod(map(compat.hint, result.shape)) * math.prod(filters)
    # The kernel for depthwise filters takes no padding of more than half a filter.
    most = padding * len(filters) if len(padding) == 1 else padding
    padded = any(2 * p > size for p, size in zip(most, filters, strict=True))
    return products >= _LEAST and (filters[-1] > COLUMNS or padded)
