"""How many floating-point operations a node takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import NodeFacts
from autoamp.rules import family


def flops_of(
    node: fx.Node, fact: NodeFacts, size: Callable[[Any], int] = compat.hint
) -> int:
    """Floating-point operations of a call that has products inside.

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
    formula = _OTHERS.get(op)
    return 0 if formula is None else formula(shapes, numel)


Shapes = Sequence[Sequence[int]]


def _layer(weights: Sequence[int]) -> Callable[[Shapes, int], int]:
    """The formula of attention with its projections, and a feed-forward perhaps.

    Args:
        weights: which tensor operands are the weights of the products.
    """

    def flops(shapes: Shapes, _: int) -> int:
        *batch, length, width = shapes[0]
        rows = math.prod(batch) * length
        products = sum(math.prod(shapes[at]) for at in weights)
        read = shapes[1][-2] if len(shapes[1]) == len(shapes[0]) else length
        return 2 * rows * products + 4 * rows * read * width

    return flops


def _cell(shapes: Shapes, _: int) -> int:
    weights = [s for s in shapes if len(s) == 2][-2:]
    return 2 * math.prod(shapes[0][:-1]) * sum(map(math.prod, weights))


def _over_last_axis(shapes: Shapes, numel: int) -> int:
    return 2 * numel * shapes[0][-1]


def _bilinear(shapes: Shapes, numel: int) -> int:
    return 2 * numel * math.prod(shapes[2][1:])


def _activated(shapes: Shapes, numel: int) -> int:
    return 2 * numel * shapes[1][-1]


def _tensordot(shapes: Shapes, numel: int) -> int:
    """Both operands together have each free size once and each summed size twice."""
    summed = math.isqrt(math.prod(map(math.prod, shapes[:2])) // max(numel, 1))
    return 2 * numel * summed


def _chain(shapes: Shapes, _: int) -> int:
    """The products from left to right; torch may find an order with fewer flops."""
    rows = shapes[0][0] if len(shapes[0]) == 2 else 1
    return 2 * rows * sum(map(math.prod, shapes[1:]))


def _factorised(shapes: Shapes, _: int) -> int:
    """The order of a factorisation's flops: its constant depends on the algorithm."""
    *batch, rows, columns = shapes[0]
    return 2 * math.prod(batch) * rows * columns * min(rows, columns)


_OTHERS: dict[str, Callable[[Shapes, int], int]] = {
    "aten::_transformer_encoder_layer_fwd": _layer((1, 3, 9, 11)),
    "aten::_native_multi_head_attention": _layer((3, 5)),
    "aten::_addmm_activation": _activated,
    "aten::bilinear": _bilinear,
    "aten::chain_matmul": _chain,
    "aten::linalg_multi_dot": _chain,
    "aten::tensordot": _tensordot,
    **dict.fromkeys(
        [f"aten::{kind}_cell" for kind in ("gru", "lstm", "rnn_relu", "rnn_tanh")],
        _cell,
    ),
    **dict.fromkeys(
        [f"aten::{name}" for name in ("_scaled_mm", "_sparse_mm", "cdist", "inner")],
        _over_last_axis,
    ),
    **dict.fromkeys(
        [
            f"aten::{name}"
            for name in (
                "cholesky",
                "inverse",
                "linalg_cholesky",
                "linalg_cholesky_ex",
                "linalg_det",
                "linalg_eigh",
                "linalg_inv",
                "linalg_inv_ex",
                "linalg_lstsq",
                "linalg_lu",
                "linalg_lu_factor",
                "linalg_matrix_exp",
                "linalg_pinv",
                "linalg_qr",
                "linalg_slogdet",
                "linalg_solve",
                "linalg_svd",
                "linalg_svdvals",
            )
        ],
        _factorised,
    ),
}
