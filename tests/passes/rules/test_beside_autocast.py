"""Each op's category beside autocast's lists, and why where the two differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autoamp import compat
from autoamp.passes.decide.devices import named_device
from autoamp.passes.rules import Category, Rule, Rules, autocast_rules
from autoamp.passes.run import rewrite_graph
from autoamp.training.options import Options
from tests.reference_autocast import LISTS, operators
from tests.small_models import Of
from tests.strategies import capture

OLDER_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Than the one that the lists are written for."""

pytestmark = pytest.mark.skipif(OLDER_TORCH, reason="the lists are of a newer torch")

MEANING = {
    "lower_precision_fp": "low",
    "fp32": "fp32",
    "fp32_set_opt_dtype": "fp32",
    "fp32_append_dtype": "fp32",
    "banned": "fp32",
    "promote": "widest",
}
AGREES = {
    "low": {Category.ALLOW},
    "fp32": {Category.DENY},
    # As wide as its widest operand is what these two are by type promotion.
    "widest": {Category.INFER, Category.CLEAR},
}
BOTH = "bf16 fp16"

Row = tuple[str, str, str, str, str, str]
"""Device, what autocast does, our category, precisions, the ops, and the reason."""

HELD = "the ceiling keeps it fp32 on this device, and another device's autocast may not"
DIFFERENT: list[Row] = [
    (
        "cpu",
        "fp32",
        "clear",
        BOTH,
        """adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_pool3d
        max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d
        replication_pad2d replication_pad3d""",
        f"it moves numbers; {HELD}",
    ),
    ("cpu", "fp32", "infer", BOTH, "avg_pool3d trace", HELD),
    (
        "cpu cuda",
        "low",
        "infer",
        BOTH,
        "prelu",
        "it is pointwise: our result is as wide as its data, which is no less true",
    ),
    (
        "cuda",
        "fp32",
        "infer",
        BOTH,
        """pow.Tensor_Scalar layer_norm native_layer_norm rms_norm group_norm
        frobenius_norm.dim upsample_nearest1d _upsample_nearest_exact1d
        upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
        _upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim softmax.int
        linalg_vector_norm sum sum.dim_IntList""",
        HELD,
    ),
    (
        "cuda",
        "fp32",
        "infer",
        "bf16",
        "cosh exp log log10 log2 reciprocal rsqrt sinh softplus",
        f"the range of bf16 holds its results; {HELD}",
    ),
    (
        "cuda",
        "low",
        "infer",
        "fp16",
        "rnn_relu_cell rnn_relu.input rnn_relu.data",
        "its state may leave the range of fp16: our result is no less true",
    ),
    (
        "cuda",
        "widest",
        "allow",
        BOTH,
        "tensordot",
        "it is a product, which the ceiling leaves low for low operands alone",
    ),
    (
        "cuda",
        "widest",
        "deny",
        BOTH,
        "grid_sampler scatter_add",
        "positions and sums of many numbers need fp32: our result is no less true",
    ),
]
"""All ops of the lists whose category is another than the one autocast would have."""


def category_on(rule: Rule, device: str) -> Category:
    """The category of a rule for calls on a device of which nothing else is known."""
    for condition in rule.when:
        if condition.test == "device_is" and condition.value == device:
            return condition.category
    return rule.category


def differing(rules: Rules, precision: str) -> Iterator[tuple[str, ...]]:
    for device in LISTS:
        for op, policy in operators(device).items():
            rule, meaning = rules.lookup(op), MEANING[policy]
            assert rule is not None, op
            category = category_on(rule, device)
            if category not in AGREES[meaning]:
                name = op.name().removeprefix("aten::")
                yield device, meaning, str(category), precision, name


def test_ops_differ_from_autocasts_lists_for_a_reason() -> None:
    found = {
        row
        for precision in BOTH.split()
        for row in differing(Rules.default(precision), precision)
    }
    told = {
        (device, meaning, category, precision, name)
        for devices, meaning, category, precisions, names, reason in DIFFERENT
        for device in devices.split()
        for precision in precisions.split()
        for name in names.split()
        if reason
    }
    assert found == told


def test_autocasts_lists_are_ours_of_the_device() -> None:
    """They are the ceiling: no category of ours makes low what autocast has in fp32."""
    listed = {
        "low": {Category.ALLOW, None},  # torch parts a recurrent layer into products
        "fp32": {Category.DENY},
        "widest": {Category.INFER},
    }
    for device in LISTS:
        rules = autocast_rules(device)
        for op, policy in operators(device).items():
            rule = rules.lookup(op)
            assert (rule and rule.category) in listed[MEANING[policy]], op


# -- products that are on no list ------------------------------------------------------


CALLS = "it calls products that autocast casts"
CELLS = f"{CALLS}; its state stays as wide as it is given, as ours does"
BELOW = "the lists have the calls for which it stands, as in an exported graph"
BUILDS = "an op of another device or build of torch"
UNLISTED: list[tuple[str, str, str]] = [
    (
        "cpu",
        "inner einsum tensordot chain_matmul linalg_multi_dot linalg_matmul",
        CALLS,
    ),
    ("cuda", "linalg_matmul _convolution_mode", CALLS),
    (
        "cpu",
        "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
        CELLS,
    ),
    ("cuda", "inner", "it calls `tensordot`, which takes the widest dtype"),
    (
        "cpu",
        "convolution _convolution_mode _scaled_dot_product_flash_attention_for_cpu",
        BELOW,
    ),
    (
        "cpu cuda",
        """thnn_conv2d slow_conv3d conv_depthwise3d _conv_depthwise2d
        slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d
        slow_conv_transpose3d _slow_conv2d_forward _scaled_dot_product_attention_math
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _flash_attention_forward _efficient_attention_forward""",
        BELOW,
    ),
    (
        "cpu cuda",
        """convolution_overrideable cudnn_convolution_relu cudnn_convolution_add_relu
        miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution
        mkldnn_convolution _scaled_dot_product_fused_attention_overrideable _cudnn_rnn
        miopen_rnn""",
        BUILDS,
    ),
    (
        "cpu",
        """cudnn_convolution cudnn_convolution_transpose _thnn_fused_lstm_cell
        _thnn_fused_gru_cell _scaled_dot_product_flash_attention""",
        BUILDS,
    ),
    ("cuda", "_scaled_dot_product_flash_attention_for_cpu mkldnn_rnn_layer", BUILDS),
    (
        "cuda",
        "_addmm_activation _native_multi_head_attention",
        "torch calls it in fast paths alone, which it does not take under autocast",
    ),
    ("cpu cuda", "_grouped_mm _mixed_dtypes_linear", "its data is low by design"),
]
"""Allow ops that the lists of a device lack, and what autocast does there."""


def test_products_that_are_on_no_list_are_known() -> None:
    found = set()
    for device in LISTS:
        listed = {op.name().partition(".")[0] for op in operators(device)}
        for precision in BOTH.split():
            for key, rule in Rules.default(precision).table.items():
                name = key.partition(".")[0]
                if category_on(rule, device) is Category.ALLOW and name not in listed:
                    found.add((device, name.removeprefix("aten::")))
    told = [
        (device, name)
        for devices, names, _ in UNLISTED
        for device in devices.split()
        for name in names.split()
    ]
    assert len(told) == len(set(told))
    assert found == set(told)


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "inner": lambda x: torch.inner(x, x),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, 1),
    "chain_matmul": lambda x: torch.chain_matmul(x, x, x),
    "linalg_multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    "linalg_matmul": lambda x: torch.linalg.matmul(x, x),
}


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("device", LISTS)
@pytest.mark.parametrize("op", PRODUCTS)
def test_a_product_of_fp32_is_low_where_autocasts_is(op: str, device: str) -> None:
    """Whether autocast casts by its list, or by that of the ops that torch calls."""
    low, x = torch.bfloat16, torch.ones(4, 4)
    region = compat.AutocastState(device, low, enabled=True)
    with FakeTensorMode(), compat.in_autocast(region):
        theirs = PRODUCTS[op](torch.empty(4, 4, device=device)).dtype
    gm = capture(Of(lambda m, x: PRODUCTS[op](x)), 1)
    options = Options(placement="promote", do_no_harm=False, strict=True)
    on = named_device("h100", low) if device == "cuda" else None
    placed = rewrite_graph(gm, [x], options, low, device=on).assignment.low
    assert bool(placed) == (theirs == low)
