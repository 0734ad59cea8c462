"""How many floating-point operations a node takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.passes.rules import family
from autoamp.passes.see.facts import NodeFacts

Shapes = Sequence[Sequence[int]]

Formula = Callable[[Shapes, int], int]
"""The flops of an op by the shapes of its operands and the size of its result."""


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
    formula = formula_of(fact.base.rstrip("_"))  # `addmm_` multiplies as `addmm` does
    return 0 if formula is None else formula(shapes, numel)


def formula_of(op: str) -> Formula | None:
    """The formula of an op without its overload, or None."""
    return _formulas().get(op)


def _product(shapes: Shapes, numel: int) -> int:
    return 2 * numel * (shapes[0][-1] if shapes and shapes[0] else 1)


def _added(shapes: Shapes, numel: int) -> int:
    return 2 * numel * shapes[1][-1]


def _convolution(shapes: Shapes, numel: int) -> int:
    if len(shapes) < 2:
        return 0
    # The weight without its first size: what one number of the result multiplies.
    return 2 * numel * math.prod(shapes[1]) // max(shapes[1][0], 1)


def _transposed_convolution(shapes: Shapes, _: int) -> int:
    # Here each number of the input, not of the result, meets a whole filter.
    return _convolution(shapes, math.prod(shapes[0])) if shapes else 0


def _heads_first(shapes: Shapes, _: int) -> int:
    """Attention whose operands are (..., heads, length, width)."""
    # Two products, the scores and the weighted sum of values, of 2 flops each.
    return 4 * math.prod(shapes[0]) * shapes[1][-2] if len(shapes) > 2 else 0


def _heads_inside(shapes: Shapes, _: int) -> int:
    """Attention whose operands are (..., length, heads, width)."""
    return 4 * math.prod(shapes[0]) * shapes[1][-3]


def _layers(shapes: Shapes, _: int) -> int:
    """The layers of a recurrent network, each weight read once in every step."""
    weights = sum(math.prod(shape) for shape in shapes[1:] if len(shape) == 2)
    return 2 * math.prod(shapes[0][:-1]) * weights


def _factorised(shapes: Shapes, _: int) -> int:
    """The order of a factorisation's flops: its constant depends on the algorithm."""
    *batch, rows, columns = shapes[0]
    return 2 * math.prod(batch) * rows * columns * min(rows, columns)


def _layer(weights: Sequence[int]) -> Formula:
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


def _summed_batch(shapes: Shapes, numel: int) -> int:
    return 2 * numel * shapes[1][0] * shapes[1][-1]


def _einsum(shapes: Shapes, numel: int) -> int:
    # An estimate: the equation is not read, and the longest index is taken as summed.
    return 2 * numel * max((s for shape in shapes for s in shape), default=1)


def _cell(shapes: Shapes, _: int) -> int:
    # Behind the input and the state, which are matrices too.
    weights = [s for s in shapes if len(s) == 2][-2:]
    return 2 * math.prod(shapes[0][:-1]) * sum(map(math.prod, weights))


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


def _trilinear(shapes: Shapes, _: int) -> int:
    """Three operands with singleton axes, broadcast, multiplied and summed."""
    first, second, third = shapes[:3]
    every = zip(first, second, third, strict=True)
    return 2 * math.prod(max(sizes) for sizes in every)


def _chain(shapes: Shapes, _: int) -> int:
    """The products from left to right; torch may find an order with fewer flops."""
    rows = shapes[0][0] if len(shapes[0]) == 2 else 1
    return 2 * rows * sum(map(math.prod, shapes[1:]))


@functools.cache
def _formulas() -> dict[str, Formula]:
    """The formula of each op that has products inside."""
    return {
        **dict.fromkeys(family("product"), _product),
        **dict.fromkeys(family("product_added"), _added),
        **dict.fromkeys(family("convolution"), _convolution),
        **dict.fromkeys(family("transposed_convolution"), _transposed_convolution),
        **dict.fromkeys(family("attention"), _heads_first),
        **dict.fromkeys(family("recurrent"), _layers),
        **dict.fromkeys(family("factorisation"), _factorised),
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
        "aten::addbmm": _summed_batch,
        "aten::einsum": _einsum,
        "aten::_trilinear": _trilinear,
        "aten::_grouped_mm": _grouped,
        "aten::_scaled_grouped_mm": _grouped,
        "aten::_scaled_grouped_mm_v2": _grouped,
        "aten::_cudnn_rnn": _layers,
        "aten::_lstm_mps": _layers,
        "aten::miopen_rnn": _layers,
        "aten::mkldnn_rnn_layer": _layers,
        "aten::gru_cell": _cell,
        "aten::lstm_cell": _cell,
        "aten::rnn_relu_cell": _cell,
        "aten::rnn_tanh_cell": _cell,
        "aten::bilinear": _bilinear,
        "aten::chain_matmul": _chain,
        "aten::linalg_multi_dot": _chain,
        "aten::tensordot": _tensordot,
    }
