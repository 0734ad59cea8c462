"""Every op of torch's that has products inside, by its name, has flops or a reason."""

from __future__ import annotations

import re

import pytest
import torch

from autoamp.place.flops import formula_of

PRODUCTS = re.compile(
    r"(mm|mv|matmul|bmm|addbmm|conv|convolution|attention|linear|bilinear|trilinear"
    r"|einsum|dot|vecdot|inner|tensordot|rnn|gru|lstm|matrix_power|multi_dot)(?![a-z])"
    r"|_conv(?!ert)|matmul|transformer|attention|convolution"
)
"""What is in the name of an op that has products inside."""

NO_PRODUCT: dict[str, str] = {
    r"backward": "a backward op is in no forward graph; its forward has the flops",
    r"upsample": "interpolates: a few multiplications an element",
    r"prepack|pack_gemm|int4pack($|_for_cpu$)|flatten_weight|reorder|_search$": (
        "lays weights out anew, or chooses an algorithm, and multiplies none"
    ),
    r"quantized_|fbgemm_|_dyn_quant|_wrapped|_cslt": (
        "its weights are packed: their sizes are no tensor's, and nothing is fp32"
    ),
    r"_thnn_fused": "takes the products of its gates, and multiplies elementwise",
    r"_foreach_mm": "takes lists of operands, whose graph nodes are no single product",
    r"_compute_linear_combination": "adds matrices that numbers are multiplied with",
    r"_cudnn_attention_forward": "the kernel behind an op that has flops",
}
"""A pattern of ops that need no flops, to the reason."""


def ops_with_products() -> list[str]:
    """The names in torch's own list; an op in place counts as the op it is."""
    schemas = torch._C._jit_get_all_schemas()
    every = {s.name.rstrip("_") for s in schemas if s.name.startswith("aten::")}
    return sorted(op for op in every if PRODUCTS.search(op.removeprefix("aten::")))


def test_the_list_is_torchs_whole_list() -> None:
    found = ops_with_products()
    assert len(found) > 100
    assert {"aten::mm", "aten::_grouped_mm", "aten::_trilinear"} <= set(found)


OTHER_NAMES = ("cdist", "linalg_solve", "linalg_inv", "linalg_svdvals")
"""Ops that have products inside, though their names do not say so."""


@pytest.mark.parametrize(
    "op", [*ops_with_products(), *(f"aten::{op}" for op in OTHER_NAMES)]
)
def test_an_op_with_products_has_flops_or_a_reason(op: str) -> None:
    reasons = [why for pattern, why in NO_PRODUCT.items() if re.search(pattern, op)]
    assert formula_of(op) or reasons


@pytest.mark.parametrize(
    ("op", "shapes", "numel", "expected"),
    [
        ("_grouped_mm", [(8, 5), (2, 5, 7), (2,)], 56, 2 * 8 * 5 * 7),
        ("_grouped_mm", [(3, 8), (8, 7), (2,)], 42, 2 * 3 * 8 * 7),
        ("_scaled_grouped_mm", [(2, 3, 5), (2, 5, 7)], 42, 2 * 2 * 3 * 5 * 7),
        ("_weight_int8pack_mm", [(3, 5), (7, 5), (7,)], 21, 2 * 3 * 5 * 7),
        ("_trilinear", [(2, 1, 5), (1, 3, 5), (2, 3, 1)], 6, 2 * 2 * 3 * 5),
        ("_flash_attention_forward", [(2, 6, 4, 8), (2, 9, 4, 8)], 0, 13824),
        ("_efficient_attention_forward", [(2, 6, 4, 8), (2, 9, 4, 8)], 0, 13824),
        ("_sparse_addmm", [(3, 7), (3, 5), (5, 7)], 21, 2 * 3 * 7 * 5),
        ("vdot", [(5,), (5,)], 1, 2 * 5),
    ],
)
def test_flops_by_hand(
    op: str, shapes: list[tuple[int, ...]], numel: int, expected: int
) -> None:
    formula = formula_of(f"aten::{op}")
    assert formula is not None
    assert formula(shapes, numel) == expected
