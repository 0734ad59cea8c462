"""Prices of ops and casts: values worked out by hand, and torch's counter of flops."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from autoamp.analyse.classify import classify
from autoamp.analyse.facts import Facts, collect_facts
from autoamp.analyse.verdict import Mode
from autoamp.options import Options
from autoamp.pipeline.run import rewrite_graph
from autoamp.place.cost import Prices, price_graph
from autoamp.place.devices import Device, Rates, device_of, rate_at
from autoamp.place.flops import flops_of
from autoamp.trace.normalise import normalise
from tests.strategies import capture

LOW = torch.bfloat16
RULES = Options(precision="bf16").resolve_rules(LOW)
attention = functional.scaled_dot_product_attention
DEVICE = Device("test", 2.0, 100.0, 4.0, 16.0, True)
"""2 bytes/ns, 100 ns for a launch, 4 flops/ns in fp32 and 16 in the low dtype."""


class Of(nn.Module):
    """A model of one function, with a weight."""

    def __init__(self, function: Callable[..., Any], shape: Sequence[int]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.zeros(*shape))

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given, self.weight)


@dataclass
class Priced:
    """A small graph and its prices."""

    nodes: dict[str, fx.Node]
    facts: Facts
    prices: Prices


def priced(
    function: Callable[..., Any],
    *given: Tensor,
    device: Device = DEVICE,
    weight: Sequence[int] = (8, 8),
    train: bool = False,
    objective: str = "time",
    do_no_harm: bool = True,
    free_weights: bool = False,
    modes: tuple[Mode, ...] = (),
) -> Priced:
    """Prices of `function(*given, weight)`; only the weight may need a gradient."""
    model = Of(function, weight).requires_grad_(train)
    gm = normalise(capture(model, len(given)), given).gm
    facts = collect_facts(gm, torch.bfloat16)
    found = classify(gm, facts, RULES, LOW, ())
    if modes:
        verdicts = {n: replace(v, modes=modes) for n, v in found.verdicts.items()}
        found = replace(found, verdicts=verdicts)
    prices = price_graph(
        gm,
        found,
        device,
        objective=objective,
        do_no_harm=do_no_harm,
        free_weights=free_weights,
    )
    return Priced({n.name: n for n in gm.graph.nodes}, facts, prices)


def relu(x: Tensor, weight: Tensor) -> Tensor:
    return x.relu()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight)


# -- ops -------------------------------------------------------------------------------


def test_a_pointwise_op_costs_a_launch_and_its_bytes() -> None:
    # 32 elements read and 32 written: 256 bytes in fp32, 128 low, at 2 bytes/ns.
    prices = priced(relu, torch.zeros(4, 8)).prices
    assert prices.ops == {"relu": (2280, 1640)}
    assert (prices.device, prices.in_bytes, prices.reward) == (DEVICE, False, 0)


def test_training_costs_three_times_as_much() -> None:
    prices = priced(lambda x, w: w.relu(), torch.zeros(1), train=True).prices
    # 64 elements read and 64 written; and the launches of the backward.
    assert prices.ops == {"relu": (3 * 3560, 3 * 2280)}


def test_a_product_is_bound_by_its_bytes_or_its_flops() -> None:
    small = priced(linear, torch.zeros(4, 8)).prices
    # 32 + 64 + 32 elements; 512 flops take 128 ns in fp32, 32 ns low: less than that.
    assert small.ops == {"linear": (1000 + 2560, 1000 + 1280)}
    large = priced(linear, torch.zeros(16, 64), weight=(64, 64)).prices
    # 131 072 flops; 6144 elements take 12 288 ns in fp32, 6144 ns low.
    assert large.ops == {"linear": (1000 + 327_680, 1000 + 81_920)}


def test_a_view_is_free_and_a_write_is_not() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return x.clone().relu_().t()

    prices = priced(function, torch.zeros(4, 8)).prices
    assert prices.ops == {"clone": (2280, 1640), "relu_": (2280, 1640), "t": (0, 0)}


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
    modes: tuple[Mode, ...], low: int
) -> None:
    """Its results are no floats, and it reads what it reads whatever its label."""
    x = torch.zeros(22)
    prices = priced(lambda x, y, w: x > y, x, x.clone(), modes=modes).prices
    assert prices.ops == {"gt": (1880, low)}


@pytest.mark.parametrize(
    ("function", "shapes", "rows"),
    [
        (torch.matmul, [(3, 8), (8, 8)], 3),
        (torch.mm, [(3, 8), (8, 8)], 3),
        (functional.linear, [(1, 3, 8), (8, 8)], 3),
        (functional.linear, [(2, 2, 8), (8, 8)], 4),
        (functional.linear, [(8,), (8, 8)], 1),
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
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], rows: int
) -> None:
    """The rate is that of the curve at the product's rows: half or a quarter of fp32's.

    Rates are so low that only arithmetic counts.
    """
    given = [torch.zeros(s) for s in shapes]
    for steps, faster in ((0.0, 2), (-0.5, 4)):
        curve = ((rows + steps, 0.02), (rows + steps + 0.5, 0.04))
        device = replace(DEVICE, high_flops_per_ns=0.01, low=Rates(products=curve))
        prices = priced(lambda *a: function(*a[:-1]), *given, device=device).prices
        ((high, low),) = prices.ops.values()
        assert high - 1000 == faster * (low - 1000) > 0


def test_a_rate_between_two_points_lies_on_a_power_law() -> None:
    curve = ((1.0, 8.0), (4.0, 32.0), (64.0, 64.0))
    assert [rate_at(curve, x) for x in (0.1, 1, 2, 4, 16, 64, math.inf)] == [
        pytest.approx(rate) for rate in (8, 8, 16, 32, 32 * 2**0.5, 64, 64)
    ]


# -- casts -----------------------------------------------------------------------------


def test_a_cast_reads_four_bytes_and_writes_two() -> None:
    prices = priced(relu, torch.zeros(4, 8)).prices
    # 32 elements of 6 bytes take 96 ns.
    assert prices.down == prices.up == {"x0": 1960, "relu": 1960}


def test_a_cast_is_undone_in_the_backward() -> None:
    prices = priced(lambda x, w: w.relu(), torch.zeros(1), train=True).prices
    assert prices.down["model_weight"] == prices.up["relu"] == 2 * (1000 + 1920)


def test_cached_copies_make_casts_of_weights_free() -> None:
    paid = priced(linear, torch.zeros(4, 8)).prices
    free = priced(linear, torch.zeros(4, 8), free_weights=True).prices
    assert paid.down["model_weight"] == 1000 + 1920
    assert free.down == paid.down | {"model_weight": 0}
    assert free.up == paid.up


def test_memory_counts_what_the_backward_keeps() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight).relu() + x.exp()

    prices = priced(function, torch.zeros(4, 8), train=True, objective="memory").prices
    assert prices.in_bytes
    assert prices.ops["linear"] == (4 * 96, 2 * 96)
    assert prices.ops["relu"] == (4 * 32, 2 * 32)
    assert prices.ops["exp"] == (0, 0), "nothing is kept of what needs no gradient"
    # One byte more than nothing, so that a cast for no reason is never free.
    assert prices.down["linear"] == 1 + 64
    assert prices.down["x0"] == 1


# -- do no harm ------------------------------------------------------------------------


def test_the_reward_outweighs_everything_else_together() -> None:
    given = torch.zeros(4, 8)
    careful = priced(lambda x, w: linear(x, w).relu(), given).prices
    told = priced(lambda x, w: linear(x, w).relu(), given, do_no_harm=False).prices
    everything = sum(a + b for a, b in careful.ops.values())
    casts = sum(careful.down.values()) + sum(careful.up.values())
    assert told.reward == 1 + everything + casts
    high, low = careful.ops["linear"]
    assert told.ops == careful.ops | {"linear": (high + told.reward, low)}


def test_a_device_that_does_not_pay_is_priced_as_if_it_did_when_told_to() -> None:
    poor = Device("poor", 2.0, 100.0, 4.0, 1.0, False)
    given = torch.zeros(4, 8)
    assert priced(relu, given, device=poor).prices.device is poor
    neutral = priced(relu, given, device=poor, do_no_harm=False).prices.device
    assert neutral.name == "bytes only, as if low precision paid"
    assert neutral.pays
    assert neutral.low_flops_per_ns > neutral.high_flops_per_ns
    assert priced(relu, given, do_no_harm=False).prices.device is DEVICE


# -- flops -----------------------------------------------------------------------------


def flops(function: Callable[..., Any], *given: Tensor) -> int:
    found = priced(lambda *a: function(*a[:-1]), *given)
    return sum(
        flops_of(found.nodes[name], found.facts.nodes[name])
        for name in found.prices.ops
    )


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(3, 5), (5, 7)]),
        (torch.bmm, [(2, 3, 5), (2, 5, 7)]),
        (torch.matmul, [(2, 1, 3, 5), (4, 5, 7)]),
        (functional.linear, [(2, 3, 5), (7, 5), (7,)]),
        (torch.addmm, [(7,), (3, 5), (5, 7)]),
        (torch.baddbmm, [(2, 3, 7), (2, 3, 5), (2, 5, 7)]),
        (functional.conv1d, [(2, 4, 9), (6, 4, 3), (6,)]),
        (functional.conv2d, [(2, 4, 9, 8), (6, 4, 3, 2)]),
        (partial(functional.conv2d, groups=2), [(2, 4, 9, 8), (6, 2, 3, 2)]),
        (functional.conv_transpose2d, [(2, 4, 5, 5), (4, 6, 3, 3)]),
        (partial(functional.conv_transpose1d, stride=2), [(2, 4, 5), (4, 6, 3)]),
        (lambda x: torch.mm(x, x), [(5, 5)]),
        (torch.relu, [(3, 5)]),
    ],
)
def test_flops_are_what_torch_counts(
    function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    given = [torch.randn(s) for s in shapes]
    with FlopCounterMode(display=False) as counter:
        function(*given)
    assert flops(function, *given) == counter.get_total_flops()


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
        (torch.addbmm, [(3, 7), (2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        (lambda a, b: torch.einsum("ij,jk->ik", a, b), [(3, 9), (9, 7)], 2 * 3 * 9 * 7),
    ],
)
def test_flops_by_hand(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], expected: int
) -> None:
    assert flops(function, *(torch.randn(s) for s in shapes)) == expected


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_flops_of_an_rnn_are_those_of_its_weights(kind: str, gates: int) -> None:
    cell = getattr(nn, kind)(5, 6).requires_grad_(False)
    # Ten steps; each multiplies 5 inputs and 6 states with every gate's 6 rows.
    assert flops(cell, torch.randn(2, 5, 5)) == 2 * 10 * gates * 6 * (5 + 6)


def test_flops_of_a_fused_encoder_layer() -> None:
    def layer(x: Tensor, *weights: Tensor) -> Tensor:  # in eval mode, without gradients
        qkv, bias, project, narrow, wide, shrink = weights
        norms = (narrow, narrow, narrow, narrow)
        more = (*norms, wide, torch.zeros(32), shrink, narrow)
        run = torch._transformer_encoder_layer_fwd
        return run(x, 16, 4, qkv, bias, project, narrow, False, False, 1e-5, *more)

    rows, projections, feed_forward = 2 * 5, 4 * 16 * 16, 2 * 16 * 32
    products = 2 * rows * (projections + feed_forward) + 4 * rows * 5 * 16
    shapes = [(2, 5, 16), (48, 16), (48,), (16, 16), (16,), (32, 16), (16, 32)]
    assert flops(layer, *(torch.randn(shape) for shape in shapes)) == products


# -- devices ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "low", "name", "pays"),
    [
        ((6, 1), torch.float16, "CUDA below 7.0", False),
        ((7, 0), torch.float16, "CUDA 7.0", True),
        ((7, 0), torch.bfloat16, "CUDA 7.0 without bf16 units", False),
        ((7, 5), torch.float16, "CUDA 7.5", True),
        ((7, 5), torch.bfloat16, "CUDA 7.5 without bf16 units", False),
        ((8, 0), torch.bfloat16, "CUDA 8.0", True),
        ((8, 6), torch.float16, "CUDA 8.6", True),
        ((8, 7), torch.float16, "CUDA 8.6", True),
        ((8, 9), torch.bfloat16, "CUDA 8.9", True),
        ((9, 0), torch.bfloat16, "CUDA 9.0", True),
        ((10, 0), torch.bfloat16, "CUDA 10.0", True),
        ((12, 0), torch.bfloat16, "CUDA 10.0", True),
    ],
)
def test_a_gpu_is_taken_for_the_newest_that_is_not_newer(
    monkeypatch, capability: tuple[int, int], low: torch.dtype, name: str, pays: bool
) -> None:
    asked = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda d: {asked: capability}[d]
    )
    found = device_of(asked, low)
    assert (found.name, found.pays) == (name, pays)


KINDS = ("matmul", "conv", "rnn")
OLDER_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

TF32_SCRIPTS: dict[str, tuple[str, set[str]]] = {
    "as torch starts": ("", {"conv", "rnn"}),
    "older switch of products": ("b.cuda.matmul.allow_tf32 = True", {*KINDS}),
    "older switch of cudnn": ("b.cudnn.allow_tf32 = False", set()),
    "all at once": ("b.fp32_precision = 'tf32'", {*KINDS}),
    # A torch before 2.13 leaves convolutions and recurrent layers as they were.
    "all off": ("b.fp32_precision = 'ieee'", {"conv", "rnn"} if OLDER_TORCH else set()),
    "products alone": (
        "b.cuda.matmul.fp32_precision = 'tf32'; b.cudnn.conv.fp32_precision = 'ieee'",
        {"matmul", "rnn"},
    ),
    "by name": ("torch.set_float32_matmul_precision('high')", {*KINDS}),
}


@pytest.mark.thorough
def test_prices_follow_torchs_switches_for_tf32() -> None:
    """The switches hold for a whole process, so that each script has a process."""
    program = """
import json, os, sys
import torch
from autoamp.place.devices import named_device

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
    lines = json.dumps([line for line, _ in TF32_SCRIPTS.values()])
    command = [sys.executable, "-c", program, lines]
    printed = subprocess.check_output(command, text=True, timeout=120)
    found = [json.loads(line) for line in printed.splitlines()]
    assert dict(zip(TF32_SCRIPTS, found, strict=True)) == {
        name: [*(156e3 if kind in kinds else 19.5e3 for kind in KINDS), 8.1e3]
        for name, (_, kinds) in TF32_SCRIPTS.items()
    }  # a T4, the last figure, has no TF32


def test_products_in_tf32_are_priced_by_their_kind() -> None:
    images, rows = torch.zeros(8, 64, 32, 32), torch.zeros(512, 512)
    fast = replace(DEVICE, tf32_flops_per_ns=40.0, tf32_kinds=frozenset({"conv"}))

    def high(function: Callable[..., Any], given: Tensor, device: Device) -> int:
        size = (64, 64, 3, 3) if given is images else (512, 512)
        found = priced(function, given, weight=size, device=device)
        return sum(pair[0] for pair in found.prices.ops.values())

    convolved = functional.conv2d
    assert high(convolved, images, fast) < high(convolved, images, DEVICE) / 5
    assert high(torch.matmul, rows, fast) == high(torch.matmul, rows, DEVICE)


@pytest.mark.parametrize(
    ("units", "name", "pays"),
    [
        ({}, "CPU without low-precision units", False),
        ({LOW: "avx512_bf16"}, "CPU with avx512_bf16", True),
        ({LOW: "amx_bf16"}, "CPU with AMX", True),
        ({torch.float16: "amx_fp16"}, "CPU without low-precision units", False),
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


@pytest.mark.parametrize("pays", [False, True])
def test_prices_may_be_those_of_a_device_that_is_not_here(pays: bool) -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight)

    x = torch.randn(64, 64)
    peak = 1000.0 if pays else 1.0
    asked = Device("asked about", 1000.0, 1.0, 10.0, peak, pays)
    found = rewrite_graph(
        capture(Of(product, (64, 64)), 1),
        (x,),
        Options(precision="bf16"),
        LOW,
        price=partial(price_graph, device=asked),
    )
    assert found.assignment.prices.device is asked
    assert [d.low for d in found.assignment.decisions.values()] == [pays]
