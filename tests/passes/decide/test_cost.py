"""Prices of ops and casts: values worked out by hand, and torch's counter of flops."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.passes.decide.door import (
    Classified,
    Device,
    Facts,
    Prices,
    Rates,
    available,
    device_of,
    flops_of,
    formula_of,
    named_device,
    price_graph,
    rate_at,
)
from tests.small_models import Of, rewritten

LOW = torch.bfloat16
DEVICE = Device("test", 2.0, 100.0, 4.0, 16.0, True)
"""2 bytes/ns, 100 ns for a launch, 4 flops/ns in fp32 and 16 in the low dtype."""

Shapes = list[tuple[int, ...]]
X: Shapes = [(4, 8)]


@dataclass
class Priced:
    """A small graph and its prices."""

    nodes: dict[str, fx.Node]
    facts: Facts
    prices: Prices
    low: list[bool]


def priced(
    function: Callable[..., Any],
    shapes: Shapes,
    *,
    device: Device = DEVICE,
    weight: tuple[int, ...] = (8, 8),
    train: bool = False,
    modes: tuple[str, ...] = (),
    **options: Any,
) -> Priced:
    """Prices of `function(*given, weight)`; only the weight may need a gradient."""
    found: list[Prices] = []

    def price(gm: fx.GraphModule, seen: Classified, _: Device, **told: Any) -> Prices:
        if modes:
            verdicts = {n: replace(v, modes=modes) for n, v in seen.verdicts.items()}
            seen = replace(seen, verdicts=verdicts)
        found.append(price_graph(gm, seen, device, **told))
        return found[-1]

    model = Of(
        lambda m, *x: function(*x, m.weight), weight=nn.Parameter(torch.zeros(weight))
    )
    given = [torch.zeros(shape) for shape in shapes]
    options = {"do_no_harm": True, "price": price, **options}
    made = rewritten(model.requires_grad_(train), given, "bf16", **options)
    low = [d.low for d in made.assignment.decisions.values()]
    nodes = {n.name: n for n in made.before.graph.nodes}
    return Priced(nodes, made.facts, found[0], low)


def relu(x: Tensor, weight: Tensor) -> Tensor:
    return x.relu()


def relu_of_weight(x: Tensor, weight: Tensor) -> Tensor:
    return weight.relu()


TRAIN = {"train": True}


@pytest.mark.parametrize(
    ("function", "shapes", "asked", "expected"),
    [
        # 32 elements read and 32 written: 256 bytes in fp32, 128 low, at 2 bytes/ns.
        (relu, X, {}, {"relu": (2280, 1640)}),
        # 64 elements read and 64 written; and the launches of the backward.
        (relu_of_weight, [(1,)], TRAIN, {"relu": (3 * 3560, 3 * 2280)}),
        # 32 + 64 + 32 elements; 512 flops take 128 ns in fp32, 32 low: less than that.
        (F.linear, X, {}, {"linear": (1000 + 2560, 1000 + 1280)}),
        # 131 072 flops; 6144 elements take 12 288 ns in fp32, 6144 ns low.
        (
            F.linear,
            [(16, 64)],
            {"weight": (64, 64)},
            {"linear": (1000 + 327_680, 1000 + 81_920)},
        ),
        # A view is free and a write is not.
        (
            lambda x, _: x.clone().relu_().t(),
            X,
            {},
            {"clone": (2280, 1640), "relu_": (2280, 1640), "t": (0, 0)},
        ),
    ],
)
def test_prices_of_ops_by_hand(
    function: Any, shapes: Shapes, asked: Any, expected: dict[str, tuple[int, int]]
) -> None:
    found = priced(function, shapes, **asked).prices
    assert found.ops == expected
    assert (found.device, found.reward) == (DEVICE, 0)


@pytest.mark.parametrize(
    ("modes", "low"),
    [
        (("any", "any"), 1880),
        (("high", "high"), 1880),
        (("any", "high"), 1880),
        (("same", "same"), 1440),
    ],
)
def test_an_op_whose_label_changes_nothing_costs_one_price(
    modes: tuple[str, ...], low: int
) -> None:
    """Its results are no floats, and it reads what it reads whatever its label."""
    found = priced(lambda x, y, w: x > y, [(22,), (22,)], modes=modes).prices
    assert found.ops == {"gt": (1880, low)}


@pytest.mark.parametrize(
    ("function", "shapes", "rows"),
    [
        (torch.matmul, [(3, 8), (8, 8)], 3),
        (torch.mm, [(3, 8), (8, 8)], 3),
        (F.linear, [(1, 3, 8), (8, 8)], 3),
        (F.linear, [(2, 2, 8), (8, 8)], 4),
        (F.linear, [(8,), (8, 8)], 1),
        (torch.matmul, [(4, 3, 8), (4, 8, 8)], 3),
        (torch.matmul, [(3, 4, 8), (3, 8, 8)], 4),
        (torch.addmm, [(8,), (3, 8), (8, 8)], 3),
        (torch.addmm, [(8,), (4, 8), (8, 8)], 4),
        (torch.mv, [(9, 8), (8,)], 1),
        (torch.addmv, [(9,), (9, 8), (8,)], 1),
        (torch.matmul, [(9, 8), (8,)], 1),
    ],
)
def test_the_rate_of_a_product_depends_on_its_rows(
    function: Callable[..., Tensor], shapes: Shapes, rows: int
) -> None:
    """The rate is that of the curve at the product's rows: half or a quarter of fp32's.

    Rates are so low that only arithmetic counts.
    """
    for steps, faster in ((0.0, 2), (-0.5, 4)):
        curve = ((rows + steps, 0.02), (rows + steps + 0.5, 0.04))
        device = replace(DEVICE, high_flops_per_ns=0.01, low=Rates(products=curve))
        prices = priced(lambda *a: function(*a[:-1]), shapes, device=device).prices
        ((high, low),) = prices.ops.values()
        assert high - 1000 == faster * (low - 1000) > 0


def test_a_rate_between_two_points_lies_on_a_power_law() -> None:
    curve = ((1.0, 8.0), (4.0, 32.0), (64.0, 64.0))
    found = [rate_at(curve, x) for x in (0.1, 1, 2, 4, 16, 64, math.inf)]
    assert found == pytest.approx([8, 8, 16, 32, 32 * 2**0.5, 64, 64])


def test_prices_of_casts_by_hand() -> None:
    # Four bytes are read and two written: 32 elements of 6 bytes take 96 ns.
    plain = priced(relu, X).prices
    assert plain.down == plain.up == {"x0": 1960, "relu": 1960}
    # A cast is undone in the backward.
    trained = priced(relu_of_weight, [(1,)], train=True).prices
    assert trained.down["model_weight"] == trained.up["relu"] == 2 * (1000 + 1920)
    # Cached copies make casts of weights free.
    paid = priced(F.linear, X).prices
    free = priced(F.linear, X, free_weights=True).prices
    assert paid.down["model_weight"] == 1000 + 1920
    assert free.down == paid.down | {"model_weight": 0}
    assert free.up == paid.up


GPU = replace(DEVICE, type="cuda")
LARGE: Shapes = [(128, 128)]


@pytest.mark.parametrize(
    ("function", "shapes", "asked", "wide"),
    [
        # Two bytes more for each of 32 numbers, at 2 bytes/ns.
        (F.linear, X, {}, {"linear": 320}),
        # Python's Function, and a cast of the gradient.
        (
            F.linear,
            LARGE,
            TRAIN | {"weight": (128, 128)},
            {"linear": 163_840 + 150_000 + 1000 + 491_520},
        ),
        (F.linear, X, {"device": DEVICE}, {}),
        (F.linear, X, {"device": replace(GPU, pays=False)}, {}),
        (F.linear, X, TRAIN, {}),  # too few numbers to pay for Python
        (lambda x, w: F.linear(x, w, w[0]), X, {}, {}),  # a bias is another kernel
        (lambda x, w: x @ w, X, {}, {"matmul": 320}),
        (lambda x, w: x @ w[0], X, {}, {}),
        (lambda x, y, w: torch.bmm(x, y), [(2, 3, 4), (2, 4, 5)], {}, {"bmm": 300}),
        (lambda x, y, w: x @ y, [(2, 3, 4), (1, 4, 5)], {}, {}),
        (relu, X, {}, {}),
    ],
)
def test_prices_of_wide_products_by_hand(
    monkeypatch: pytest.MonkeyPatch,
    function: Any,
    shapes: Shapes,
    asked: Any,
    wide: dict[str, int],
) -> None:
    monkeypatch.setattr("autoamp.compat.products_give_fp32", lambda: True)
    found = priced(function, shapes, **{"device": GPU, **asked}).prices
    assert found.wide == wide
    assert all(price <= found.up[name] for name, price in wide.items())


# -- do no harm ------------------------------------------------------------------------


def test_the_reward_outweighs_everything_else_together() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).relu()

    careful = priced(function, X).prices
    told = priced(function, X, do_no_harm=False).prices
    everything = sum(a + b for a, b in careful.ops.values())
    casts = sum(careful.down.values()) + sum(careful.up.values())
    assert told.reward == 1 + everything + casts
    high, low = careful.ops["linear"]
    assert told.ops == careful.ops | {"linear": (high + told.reward, low)}


def test_a_device_that_does_not_pay_is_priced_as_if_it_did_when_told_to() -> None:
    poor = Device("poor", 2.0, 100.0, 4.0, 1.0, False)
    assert priced(relu, X, device=poor).prices.device is poor
    neutral = priced(relu, X, device=poor, do_no_harm=False).prices.device
    assert neutral.pays
    assert neutral.low_flops_per_ns > neutral.high_flops_per_ns
    assert neutral.name == device_of(torch.device("meta"), LOW).name
    assert priced(relu, X, do_no_harm=False).prices.device is DEVICE


@pytest.mark.parametrize("pays", [False, True])
def test_prices_may_be_those_of_a_device_that_is_not_here(pays: bool) -> None:
    peak = 1000.0 if pays else 1.0
    asked = Device("asked about", 1000.0, 1.0, 10.0, peak, pays)
    assert priced(F.linear, [(64, 64)], weight=(64, 64), device=asked).low == [pays]


# -- flops -----------------------------------------------------------------------------


def flops(function: Callable[..., Any], shapes: Shapes) -> int:
    found = priced(lambda *a: function(*a[:-1]), shapes)
    nodes, facts = found.nodes, found.facts.nodes
    return sum(flops_of(nodes[name], facts[name]) for name in found.prices.ops)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(3, 5), (5, 7)]),
        (torch.bmm, [(2, 3, 5), (2, 5, 7)]),
        (torch.matmul, [(2, 1, 3, 5), (4, 5, 7)]),
        (F.linear, [(2, 3, 5), (7, 5), (7,)]),
        (torch.addmm, [(7,), (3, 5), (5, 7)]),
        (torch.baddbmm, [(2, 3, 7), (2, 3, 5), (2, 5, 7)]),
        (F.conv1d, [(2, 4, 9), (6, 4, 3), (6,)]),
        (F.conv2d, [(2, 4, 9, 8), (6, 4, 3, 2)]),
        (partial(F.conv2d, groups=2), [(2, 4, 9, 8), (6, 2, 3, 2)]),
        (F.conv1d, [(2, 4, 9), (1, 4, 3)]),  # one filter
        (F.conv_transpose2d, [(2, 4, 5, 5), (4, 6, 3, 3)]),
        (partial(F.conv_transpose1d, stride=2), [(2, 4, 5), (4, 6, 3)]),
        (lambda x: torch.mm(x, x), [(5, 5)]),
        (torch.relu, [(3, 5)]),
    ],
)
def test_flops_are_what_torch_counts(
    function: Callable[..., Any], shapes: Shapes
) -> None:
    with FlopCounterMode(display=False) as counter:
        function(*(torch.zeros(shape) for shape in shapes))
    assert flops(function, shapes) == counter.get_total_flops()


attention = F.scaled_dot_product_attention


def encoder_layer(x: Tensor, *weights: Tensor) -> Tensor:
    qkv, bias, project, narrow, wide, shrink = weights
    norms = (narrow, narrow, narrow, narrow)
    more = (*norms, wide, torch.zeros(32), shrink, narrow)
    run = torch._transformer_encoder_layer_fwd
    return run(x, 16, 4, qkv, bias, project, narrow, False, False, 1e-5, *more)


def of_rnn(kind: str) -> Callable[..., Any]:
    return getattr(nn, kind)(5, 6).requires_grad_(False)


LAYER: Shapes = [(2, 5, 16), (48, 16), (48,), (16, 16), (16,), (32, 16), (16, 32)]
IN_LAYER = 2 * 10 * (4 * 16 * 16 + 2 * 16 * 32) + 4 * 10 * 5 * 16
"""Its projections and its feed-forward of ten rows, and what they attend to."""


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        # torch's counter knows none of these on a CPU: two flops a multiply-add.
        (attention, [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)], 4 * 6 * 5 * 7 * 8),
        (lambda x: attention(x, x, x), [(2, 3, 5, 8)], 4 * 6 * 5 * 5 * 8),
        (torch.mv, [(3, 5), (5,)], 2 * 3 * 5),
        (torch.addmv, [(3,), (3, 5), (5,)], 2 * 3 * 5),
        (torch.dot, [(5,), (5,)], 2 * 5),
        (torch.linalg.vecdot, [(3, 5), (3, 5)], 2 * 3 * 5),
        (lambda a, *b: a.relu().addmm_(*b), [(3, 7), (3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (torch.addbmm, [(3, 7), (2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        (lambda a, b: torch.einsum("ij,jk->ik", a, b), [(3, 9), (9, 7)], 2 * 3 * 9 * 7),
        # Ten steps; each multiplies 5 inputs and 6 states with every gate's 6 rows.
        (of_rnn("LSTM"), [(2, 5, 5)], 2 * 10 * 4 * 6 * (5 + 6)),
        (of_rnn("GRU"), [(2, 5, 5)], 2 * 10 * 3 * 6 * (5 + 6)),
        (of_rnn("RNN"), [(2, 5, 5)], 2 * 10 * 1 * 6 * (5 + 6)),
        (encoder_layer, LAYER, IN_LAYER),
    ],
)
def test_flops_by_hand(
    function: Callable[..., Any], shapes: Shapes, expected: int
) -> None:
    assert flops(function, shapes) == expected


@pytest.mark.parametrize(
    ("op", "shapes", "numel", "expected"),
    [
        ("_grouped_mm", [(8, 5), (2, 5, 7), (2,)], 56, 2 * 8 * 5 * 7),
        ("_grouped_mm", [(3, 8), (8, 7), (2,)], 42, 2 * 3 * 8 * 7),
        ("_scaled_grouped_mm", [(2, 3, 5), (2, 5, 7)], 42, 2 * 2 * 3 * 5 * 7),
        ("_weight_int8pack_mm", [(3, 5), (7, 5), (7,)], 21, 2 * 3 * 5 * 7),
        ("_trilinear", [(2, 1, 5), (1, 3, 5), (2, 3, 1)], 6, 2 * 2 * 3 * 5),
        ("_trilinear", [(2, 1, 1), (1, 3, 1), (1, 1, 5)], 30, 2 * 2 * 3 * 5),
        ("linalg_multi_dot", [(5,), (5, 7), (7, 3)], 3, 2 * (5 * 7 + 7 * 3)),
        ("linalg_multi_dot", [(4, 5), (5, 7), (7, 3)], 12, 2 * 4 * (5 * 7 + 7 * 3)),
        ("_flash_attention_forward", [(2, 6, 4, 8), (2, 9, 4, 8)], 0, 13824),
        ("_efficient_attention_forward", [(2, 6, 4, 8), (2, 9, 4, 8)], 0, 13824),
        ("_sparse_addmm", [(3, 7), (3, 5), (5, 7)], 21, 2 * 3 * 7 * 5),
        ("vdot", [(5,), (5,)], 1, 2 * 5),
    ],
)
def test_flops_of_ops_that_no_cpu_runs_by_hand(
    op: str, shapes: Shapes, numel: int, expected: int
) -> None:
    formula = formula_of(f"aten::{op}")
    assert formula is not None
    assert formula(shapes, numel) == expected


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


def test_every_op_of_torchs_with_products_has_flops_or_a_reason() -> None:
    """By its name; an op in place counts as the op it is."""
    schemas = torch._C._jit_get_all_schemas()
    every = {s.name.rstrip("_") for s in schemas if s.name.startswith("aten::")}
    found = {op for op in every if PRODUCTS.search(op.removeprefix("aten::"))}
    assert len(found) > 100
    assert {"aten::mm", "aten::_grouped_mm", "aten::_trilinear"} <= found
    # These have products inside, though their names do not say so.
    found |= {f"aten::{n}" for n in ("cdist", "linalg_solve", "linalg_inv")}
    found |= {"aten::linalg_svdvals"}
    reasons = "|".join(NO_PRODUCT)
    assert not {op for op in found if not formula_of(op) and not re.search(reasons, op)}


# -- devices ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "low", "name", "pays"),
    [
        ((6, 1), torch.float16, "GPU below compute capability 7.0", False),
        ((7, 0), torch.float16, "V100 (compute capability 7.0)", True),
        (
            (7, 0),
            torch.bfloat16,
            "V100 (compute capability 7.0) without bf16 units",
            False,
        ),
        ((7, 5), torch.float16, "T4 (compute capability 7.5)", True),
        (
            (7, 5),
            torch.bfloat16,
            "T4 (compute capability 7.5) without bf16 units",
            False,
        ),
        ((8, 0), torch.bfloat16, "A100 (compute capability 8.0)", True),
        ((8, 6), torch.float16, "A10 (compute capability 8.6)", True),
        ((8, 7), torch.float16, "A10 (compute capability 8.6)", True),
        ((8, 9), torch.bfloat16, "RTX 4090 (compute capability 8.9)", True),
        ((9, 0), torch.bfloat16, "H100 (compute capability 9.0)", True),
        ((10, 0), torch.bfloat16, "B200 (compute capability 10.0)", True),
        ((11, 0), torch.bfloat16, "B200 (compute capability 10.0)", True),
        ((12, 0), torch.bfloat16, "RTX 5090 (compute capability 12.0)", True),
        ((12, 1), torch.bfloat16, "RTX 5090 (compute capability 12.0)", True),
    ],
)
def test_a_gpu_is_taken_for_the_newest_that_is_not_newer(
    monkeypatch, capability: tuple[int, int], low: torch.dtype, name: str, pays: bool
) -> None:
    asked = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    known = {asked: capability}
    monkeypatch.setattr(torch.cuda, "get_device_capability", known.__getitem__)
    found = device_of(asked, low)
    assert (found.name, found.pays) == (name, pays)


@pytest.mark.parametrize(
    ("units", "name", "pays"),
    [
        ({}, "CPU without bf16 units", False),
        ({LOW: "avx512_bf16"}, "CPU with avx512_bf16", True),
        ({LOW: "amx_bf16"}, "CPU with AMX", True),
        ({torch.float16: "amx_fp16"}, "CPU without bf16 units", False),
    ],
)
def test_a_cpu_is_known_by_its_unit_for_the_dtype(
    monkeypatch, units: dict[torch.dtype, str], name: str, pays: bool
) -> None:
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", lambda: units)
    found = device_of(torch.device("cpu"), LOW)
    assert (found.name, found.pays) == (name, pays)


def test_an_unknown_device_is_neutral(monkeypatch) -> None:
    name = "bytes only, as if low precision paid"
    assert device_of(torch.device("meta"), LOW).name == name
    # A graph made for CUDA, looked at on a machine without.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(torch.device("cuda"), LOW).name == name


KINDS = ("matmul", "conv", "rnn")
OLDER_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

TF32_SCRIPTS: dict[str, set[str]] = {
    "as_torch_starts = True": {"conv", "rnn"},
    "b.cuda.matmul.allow_tf32 = True": {*KINDS},
    "b.cudnn.allow_tf32 = False": set(),
    "b.fp32_precision = 'tf32'": {*KINDS},
    # A torch before 2.13 leaves convolutions and recurrent layers as they were.
    "b.fp32_precision = 'ieee'": {"conv", "rnn"} if OLDER_TORCH else set(),
    "b.cuda.matmul.fp32_precision = 'tf32'; b.cudnn.conv.fp32_precision = 'ieee'": {
        "matmul",
        "rnn",
    },
    "torch.set_float32_matmul_precision('high')": {*KINDS},
}
"""Each script, and the kinds of products that it leaves in TF32."""


def test_prices_follow_torchs_switches_for_tf32() -> None:
    """The switches hold for a whole process, so that each script has a process."""
    program = """
import json, os, sys
import torch
from autoamp.passes.decide.devices import named_device

b = torch.backends
for line in json.loads(sys.argv[1]):
    if os.fork():
        os.wait()
        continue
    exec(line)
    device, older = (named_device(f"cuda:sm_{n}", torch.float16) for n in (80, 75))
    peaks = [device.fp32_peak(kind) for kind in ("matmul", "conv", "rnn")]
    print(json.dumps([*peaks, older.fp32_peak("conv")]), flush=True)
    os._exit(0)
"""
    command = [sys.executable, "-c", program, json.dumps([*TF32_SCRIPTS])]
    printed = subprocess.check_output(command, text=True, timeout=120)
    found = [json.loads(line) for line in printed.splitlines()]
    assert found == [
        [*(156e3 if kind in kinds else 19.5e3 for kind in KINDS), 8.1e3]
        for kinds in TF32_SCRIPTS.values()
    ]  # a T4, the last figure, has no TF32


def test_products_in_tf32_are_priced_by_their_kind() -> None:
    fast = replace(DEVICE, tf32_flops_per_ns=40.0, tf32_kinds=frozenset({"conv"}))

    def high(function: Any, shape: Any, weight: Any, device: Device) -> int:
        found = priced(function, [shape], weight=weight, device=device).prices
        return sum(pair[0] for pair in found.ops.values())

    convolved = partial(high, F.conv2d, (8, 64, 32, 32), (64, 64, 3, 3))
    assert convolved(fast) < convolved(DEVICE) / 5
    multiplied = partial(high, torch.matmul, (512, 512), (512, 512))
    assert multiplied(fast) == multiplied(DEVICE)
    batched = partial(high, torch.matmul, (8, 512, 512), (8, 512, 512))
    assert batched(fast) == batched(DEVICE)
    assert batched(replace(fast, tf32_kinds=frozenset({"matmul"}))) < batched(DEVICE)


def test_each_kind_of_product_has_its_own_rate() -> None:
    rates = Rates(convolution=3.0, channelwise=5.0, batched=7.0)
    device = replace(DEVICE, low=rates)
    expected = {"conv": 3.0, "channelwise": 5.0, "batched": 7.0}
    expected["matmul"] = DEVICE.low_flops_per_ns
    assert {k: device.flops_per_ns(k, 64, low=True) for k in expected} == expected


def test_memory_is_what_the_system_and_torchs_cache_have_left(monkeypatch) -> None:
    left = available(torch.device("cpu"))
    assert left is None or left > 1024 * 1024
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (500, 900))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10)
    assert available(torch.device("cuda")) == 520
    assert available(torch.device("meta")) is None


def test_gpus_with_units_for_the_dtype_keep_sums() -> None:
    """`torch.mm(..., out_dtype=)` is of CUDA alone; V100 has no units for bf16."""
    keeps = {
        (name, low): named_device(name, low).keeps_sums
        for name in ("cuda:sm_70", "cuda:sm_90", "cpu:amx")
        for low in (torch.bfloat16, torch.float16)
    }
    assert [each for each, kept in keeps.items() if kept] == [
        ("cuda:sm_70", torch.float16),
        ("cuda:sm_90", torch.bfloat16),
        ("cuda:sm_90", torch.float16),
    ]
