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
    op = fact.base.rstrip("_")  # `addmm_` multiplies as `addmm` does
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
        return _layers(shapes, numel)
    formula = _OTHERS.get(op)
    return 0 if formula is None else formula(shapes, numel)


Shapes = Sequence[Sequence[int]]


def _layer(weights: Sequence[int]) -> Callable[[Shapes, int], int]:
    """The formula of attention with its projections, and of a feed-forward, if any.

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


def _tensordot(shapes: Shapes, numel: int) -> int:
    """Both operands together have each free size once and each summed size twice."""
    summed = math.isqrt(math.prod(map(math.prod, shapes[:2])) // max(numel, 1))
    return 2 * numel * summed


def _grouped(shapes: Shapes, numel: int) -> int:
    """Groups of rows, each with a matrix of its own, or groups of the summed axis."""
    if len(shapes[0]) == len(shapes[1]) == 2:
        return 2 * math.prod(shapes[0]) * shapes[1][-1]
    return 2 * numel * shapes[0][-1]


def _added(shapes: Shapes, numel: int) -> int:
    return 2 * numel * shapes[1][-1]


def _trilinear(shapes: Shapes, _: int) -> int:
    """Three operands with singleton axes, broadcast, multiplied and summed."""
    first, second, third = shapes[:3]
    every = zip(first, second, third, strict=True)
    return 2 * math.prod(max(sizes) for sizes in every)


def _heads_first(shapes: Shapes, _: int) -> int:
    """Attention whose operands are (..., heads, length, width)."""
    return 4 * math.prod(shapes[0]) * shapes[1][-2]


def _heads_inside(shapes: Shapes, _: int) -> int:
    """Attention whose operands are (..., length, heads, width)."""
    return 4 * math.prod(shapes[0]) * shapes[1][-3]


def _layers(shapes: Shapes, _: int) -> int:
    """The layers of a recurrent network, each weight read once in every step."""
    weights = sum(math.prod(shape) for shape in shapes[1:] if len(shape) == 2)
    return 2 * math.prod(shapes[0][:-1]) * weights


def _chain(shapes: Shapes, _: int) -> int:
    """The products from left to right; torch may find an order with fewer flops."""
    rows = shapes[0][0] if len(shapes[0]) == 2 else 1
    return 2 * rows * sum(map(math.prod, shapes[1:]))


def _factorised(shapes: Shapes, _: int) -> int:
    """The order of a factorisation's flops: its constant depends on the algorithm."""
    *batch, rows, columns = shapes[0]
    return 2 * math.prod(batch) * rows * columns * min(rows, columns)


_OVER_LAST_AXIS = (
    "_int_mm",
    "_mixed_dtypes_linear",
    "_scaled_mm",
    "_scaled_mm_v2",
    "_sparse_mm",
    "_sparse_mm_reduce_impl",
    "_sparse_semi_structured_linear",
    "_sparse_semi_structured_mm",
    "_sparse_sparse_matmul",
    "_weight_int4pack_mm",
    "_weight_int4pack_mm_for_cpu",
    "_weight_int4pack_mm_with_scales_and_zeros",
    "_weight_int8pack_mm",
    "cdist",
    "hspmm",
    "inner",
    "linalg_matmul",
    "linalg_matrix_power",
    "matrix_power",
    "mkldnn_linear",
    "smm",
    "vdot",
)

_OTHERS: dict[str, Callable[[Shapes, int], int]] = {
    "aten::_transformer_encoder_layer_fwd": _layer((1, 3, 9, 11)),
    "aten::_native_multi_head_attention": _layer((3, 5)),
    "aten::_triton_multi_head_attention": _layer((3, 5)),
    "aten::_triton_scaled_dot_attention": _heads_first,
    "aten::_flash_attention_forward": _heads_inside,
    "aten::_flash_attention_forward_no_dropout_inplace": _heads_inside,
    "aten::_efficient_attention_forward": _heads_inside,
    "aten::_addmm_activation": _added,
    "aten::_sparse_addmm": _added,
    "aten::_sparse_semi_structured_addmm": _added,
    "aten::sparse_sampled_addmm": _added,
    "aten::sspaddmm": _added,
    "aten::_trilinear": _trilinear,
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm_v2": _grouped,
    "aten::_cudnn_rnn": _layers,
    "aten::_lstm_mps": _layers,
    "aten::miopen_rnn": _layers,
    "aten::mkldnn_rnn_layer": _layers,
    "aten::bilinear": _bilinear,
    "aten::chain_matmul": _chain,
    "aten::linalg_multi_dot": _chain,
    "aten::tensordot": _tensordot,
    **dict.fromkeys(
        [f"aten::{kind}_cell" for kind in ("gru", "lstm", "rnn_relu", "rnn_tanh")],
        _cell,
    ),
    **dict.fromkeys(
        [f"aten::{name}" for name in _OVER_LAST_AXIS],
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

_FAMILIES = (
    "product",
    "product_added",
    "convolution",
    "transposed_convolution",
    "attention",
    "recurrent",
)


def has_flops(op: str) -> bool:
    """Whether `flops_of` has a formula for an op."""
    written_out = ("aten::addbmm", "aten::einsum")
    return op in _OTHERS or op in written_out or any(op in family(f) for f in _FAMILIES)
