"""How many floating-point operations a node takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import NodeFacts
from autoamp.rules import family


def flops_of(
    node: fx.Node, fact: NodeFacts, size: Callable[[Any], int] = compat.hint
) -> int:
    """Floating-point operations of a matrix product, convolution, attention or RNN.

    A multiply-add counts as two, as in torch.utils.flop_counter; other ops count 0.

    Args:
        size: gives the value of a symbolic size; by default the captured value.
    """
    operands: list[fx.Node] = []  # `all_input_nodes` drops repeated operands
    fx.map_arg((node.args, node.kwargs), operands.append)
    shapes = [
        [size(s) for s in n.meta["val"].shape]
        for n in operands
        if isinstance(n.meta.get("val"), torch.Tensor)
    ]
    result = node.meta.get("val")
    numel = fact.numel
    if size is not compat.hint and isinstance(result, torch.Tensor):
        numel = math.prod(size(s) for s in result.shape)
    op = fact.base
    if op in family("product"):
        return 2 * numel * (shapes[0][-1] if shapes and shapes[0] else 1)
    if op in family("product_added"):
        return 2 * numel * shapes[1][-1]
    if op == "aten::addbmm":
        return 2 * numel * shapes[1][0] * shapes[1][-1]
    if op == "aten::einsum":
        return 2 * numel * max((s for shape in shapes for s in shape), default=1)
    if op in family("convolution") and len(shapes) > 1:
        return 2 * numel * math.prod(shapes[1]) // max(shapes[1][0], 1)
    if op in family("transposed_convolution") and len(shapes) > 1:
        read = math.prod(shapes[0])
        return 2 * read * math.prod(shapes[1]) // max(shapes[1][0], 1)
    if op in family("attention") and len(shapes) > 2:
        *batch, queries, width = shapes[0]
        return 4 * math.prod(batch) * queries * shapes[1][-2] * width
    if op in family("recurrent"):
        steps = math.prod(shapes[0][:-1])
        return 2 * steps * sum(math.prod(s) for s in shapes[1:] if len(s) == 2)
    return 0
