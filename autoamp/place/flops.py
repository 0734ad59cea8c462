"""How many floating-point operations a node takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import NodeFacts
from autoamp.op_names import split_key


def flops_of(
    node: fx.Node, fact: NodeFacts, size: Callable[[Any], int] = compat.hint
) -> int:
    """Floating-point operations of a matrix product, convolution, attention or RNN.

    A multiply-add counts as two, as in torch.utils.flop_counter; other ops count 0.

    Args:
        size: gives the value of a symbolic size; by default the captured value.
    """
    _, name, _ = split_key(fact.op)
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
    if name in ("linear", "matmul", "mm", "bmm", "mv", "linalg_vecdot", "dot"):
        return 2 * numel * (shapes[0][-1] if shapes and shapes[0] else 1)
    if name in ("addmm", "baddbmm", "addmv"):
        return 2 * numel * shapes[1][-1]
    if name == "addbmm":
        return 2 * numel * shapes[1][0] * shapes[1][-1]
    if name == "einsum":
        return 2 * numel * max((s for shape in shapes for s in shape), default=1)
    if "conv" in name and len(shapes) > 1:
        weight = math.prod(shapes[1])
        if "transpose" in name:
            return 2 * math.prod(shapes[0]) * weight // max(shapes[1][0], 1)
        return 2 * numel * weight // max(shapes[1][0], 1)
    if "scaled_dot_product" in name and len(shapes) > 2:
        *batch, queries, width = shapes[0]
        return 4 * math.prod(batch) * queries * shapes[1][-2] * width
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        steps = math.prod(shapes[0][:-1])
        return 2 * steps * sum(math.prod(s) for s in shapes[1:] if len(s) == 2)
    return 0
