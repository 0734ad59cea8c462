"""Which low products can write the fp32 sums of their kernels as they are.

Every kernel that multiplies 16-bit numbers sums in fp32 and rounds each sum as it
writes; those for CUDA can leave the rounding out (`functions/products.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.passes.decide.devices import Device

PYTHON_NS = 15_000.0
"""What a `product` with a gradient costs more than a layer: Python's forward and
backward of a Function.  A Zen 5 core takes 9 to 11 us (benchmarks/results/
accumulators.md of commit 6d6f6897), and the cores beside GPUs are slower as a rule."""

SAVED = 4
"""Bytes that a number saves: written low, read again and written wide it moves 8, and
written wide at once 4."""

_ATEN = torch.ops.aten

TURNED: dict[Any, bool] = {
    _ATEN.linear.default: True,
    _ATEN.addmm.default: False,
    _ATEN.bmm.default: False,
    _ATEN.matmul.default: False,
    _ATEN.mm.default: False,
}
"""The products, and whether each reads its second operand turned, (out, in)."""


def keeps_sums(node: fx.Node, device: Device, *, grad: bool) -> bool:
    """Whether a product, if it is low, can write fp32 numbers for no more than a cast.

    Args:
        grad: whether a gradient flows through the product.
    """
    if not device.keeps_sums or not fits(node):
        return False
    return not grad or pays(compat.hint(node.meta["val"].numel()), device)


def pays(numbers: int, device: Device) -> bool:
    """Whether a Function of Python's takes less time than the bytes that it saves."""
    return numbers * SAVED > PYTHON_NS * device.bytes_per_ns


def fits(node: fx.Node) -> bool:
    """Whether a node is a product without bias of rows by a matrix, or of two batches.

    A bias is added to fp32 numbers by a kernel of its own, which moves more bytes than
    a cast: 12 for a number, where the low product and the cast move 8.
    """
    if node.target not in TURNED or node.kwargs or len(node.args) != 2:
        return False
    data, factor = (each.meta["val"] for each in node.args)  # type: ignore[union-attr]
    if not is_dense(node.meta["val"]):
        return False
    if factor.dim() == 2:
        return bool(data.dim() >= 1)
    leading = [[*map(str, each.shape[:-2])] for each in (data, factor)]
    return min(data.dim(), factor.dim()) > 2 and leading[0] == leading[1]


def is_dense(value: Tensor) -> bool:
    """Whether a tensor lies row after row, without gaps."""
    sizes, strides = ([*map(compat.hint, t)] for t in (value.shape, value.stride()))
    return all(
        size == 1 or stride == math.prod(sizes[at + 1 :])
        for at, (size, stride) in enumerate(zip(sizes, strides, strict=True))
    )
