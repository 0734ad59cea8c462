"""The price model: the cost of each op in each precision, and of each cast.

The model is a roofline of the device: an op takes a launch plus the larger of its bytes
over the bandwidth and its flops over the peak.  The figures are orders of magnitude,
for ranking placements; measurements on the device at hand would replace them.  Prices
are integers of 0.1 ns, because a min-cut needs exact sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import Facts, NodeFacts
from autoamp.analyse.verdict import GAVE_UP, Verdict
from autoamp.errors import PassError
from autoamp.op_names import split_key
from autoamp.rules import Category

UNIT_NS = 0.1
"""Nanoseconds per unit of price."""

TRAINING_FACTOR = 3
"""Forward plus backward: a matmul's backward is two products of the same size, and a
pointwise op's backward reads and writes about twice what its forward did."""


@dataclass(frozen=True)
class Device:
    """A roofline.

    Attributes:
        name: the hardware that the figures describe, for the report.
        bytes_per_ns: memory bandwidth, GB/s.
        launch_ns: fixed cost of one op.
        high_flops_per_ns, low_flops_per_ns: matrix-product peaks, GFLOP/s.
        pays: whether low precision can pay on the device at all.
        least_rows: rows below which a matrix product loses by low precision.
    """

    name: str
    bytes_per_ns: float
    launch_ns: float
    high_flops_per_ns: float
    low_flops_per_ns: float
    pays: bool
    least_rows: int = 1


# `linear` of 1 to 3 rows takes longer in bf16 than in fp32 on a CPU with AMX: 1.07 to
# 1.21 times as long for the products of a GPT-2 block's MLP, while 4 rows take 0.67
# times as long (benchmarks/results/rows-cpu.md).
_CPU_ROWS = 4
_FEW_ROWS = 1.17

_CPU = Device("CPU without low-precision units", 15.0, 2000.0, 100.0, 25.0, False)
_CPU_AVX = Device("CPU with avx512_bf16", 15.0, 2000.0, 100.0, 180.0, True, _CPU_ROWS)
_CPU_AMX = Device("CPU with AMX", 15.0, 2000.0, 100.0, 800.0, True, _CPU_ROWS)
_NEUTRAL = Device(
    "bytes only, as if low precision paid", 15.0, 2000.0, 100.0, 200.0, True
)

# NVIDIA data sheets: memory bandwidth, TF32-off fp32 and dense half-precision peaks of
# V100 (7.0), T4 (7.5), A100 (8.0), RTX 40 (8.9), H100/H200 (9.0) and B200 (10.0).
_CUDA = {
    70: Device("CUDA 7.0", 900.0, 4000.0, 15_700.0, 112_000.0, True),
    75: Device("CUDA 7.5", 320.0, 4000.0, 8_100.0, 65_000.0, True),
    80: Device("CUDA 8.0", 1_900.0, 4000.0, 19_500.0, 312_000.0, True),
    89: Device("CUDA 8.9", 1_000.0, 4000.0, 80_000.0, 165_000.0, True),
    90: Device("CUDA 9.0", 3_900.0, 4000.0, 60_000.0, 790_000.0, True),
    100: Device("CUDA 10.0", 7_700.0, 4000.0, 75_000.0, 2_200_000.0, True),
}
_CUDA_OLD = Device("CUDA below 7.0", 500.0, 4000.0, 10_000.0, 10_000.0, False)


def device_of(device: torch.device, low: torch.dtype) -> Device:
    """The roofline for `device` computing in `low`."""
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        known = [c for c in _CUDA if c <= 10 * major + minor]
        if not known or (low is torch.bfloat16 and major < 8):
            return _CUDA_OLD
        return _CUDA[max(known)]
    if device.type == "cpu":
        unit = compat.cpu_low_precision_units().get(low, "")
        if unit.startswith("amx"):
            return _CPU_AMX
        return _CPU_AVX if unit else _CPU
    return _NEUTRAL


@dataclass(frozen=True)
class Prices:
    """Prices of one graph, in units of 0.1 ns.

    Attributes:
        ops: node to (cost in fp32, cost in the low dtype).
        down, up: value to the cost of one cast of it.
        reward: the amount added to the fp32 cost of every allow op, 0 with do_no_harm.
        in_bytes: whether prices count bytes kept for the backward instead of time.
        device: the roofline behind the prices.
    """

    ops: Mapping[str, tuple[int, int]]
    down: Mapping[str, int]
    up: Mapping[str, int]
    reward: int
    in_bytes: bool
    device: Device


def price_graph(
    gm: fx.GraphModule,
    facts: Facts,
    verdicts: Mapping[str, Verdict],
    device: Device,
    *,
    objective: str,
    do_no_harm: bool,
    free_weights: bool,
) -> Prices:
    """Prices every op and every possible cast of a graph.

    Args:
        objective: "time", or "memory" for bytes kept for the backward.
        do_no_harm: False adds `reward` to the fp32 cost of every allow op, more than
            all the casts of the graph cost together, so that it is low wherever legal.
        free_weights: weights cost nothing to cast, since cached copies are passed in.
    """
    if not do_no_harm and not device.pays:
        device = _NEUTRAL
    model = _Model(device, objective)
    nodes = {n.name: n for n in gm.graph.nodes}
    ops = {n: model.priced(nodes[n], facts.nodes[n], v) for n, v in verdicts.items()}
    for name, verdict in verdicts.items():
        # Such a node (the model's own cast to bf16) reads the same with either label.
        if not facts.nodes[name].makes_floats and set(verdict.modes) <= {"any", "high"}:
            ops[name] = (ops[name][0], ops[name][0])
    values = [f for f in facts.nodes.values() if f.is_value]
    casts = {f.name: model.cast(f) for f in values}
    down = dict(casts)
    if free_weights:
        down.update(dict.fromkeys(facts.weights & casts.keys(), 0))
    reward = 0
    if not do_no_harm:
        reward = 1 + sum(a + b for a, b in ops.values()) + 2 * sum(casts.values())
        for name, verdict in verdicts.items():
            if verdict.category is Category.ALLOW:
                high, low = ops[name]
                ops[name] = (high + reward, low)
    return Prices(ops, down, casts, reward, objective == "memory", device)


class _Model:
    def __init__(self, device: Device, objective: str) -> None:
        self.device = device
        self.by_memory = objective == "memory"

    def priced(
        self, node: fx.Node, fact: NodeFacts, verdict: Verdict
    ) -> tuple[int, int]:
        """The prices of an op; 0 for an op that a failed check keeps fp32."""
        if verdict.origin == GAVE_UP:
            return 0, 0
        try:
            return self.op(node, fact)
        except Exception as error:
            raise PassError.at(node.name, error) from error

    def op(self, node: fx.Node, fact: NodeFacts) -> tuple[int, int]:
        return self._op(node, fact, 4), self._op(node, fact, 2)

    def _op(self, node: fx.Node, fact: NodeFacts, itemsize: int) -> int:
        if self.by_memory:
            return itemsize * fact.read_numel if fact.requires_grad else 0
        if _is_free(node):
            return 0
        if itemsize == 2 and _rows(node, fact) < self.device.least_rows:
            return round(_FEW_ROWS * self._op(node, fact, 4))
        peak = self.device.high_flops_per_ns
        if itemsize == 2:
            peak = self.device.low_flops_per_ns
        moved = itemsize * (fact.read_numel + fact.numel) / self.device.bytes_per_ns
        nanoseconds = self.device.launch_ns + max(moved, flops_of(node, fact) / peak)
        return self._units(nanoseconds * (TRAINING_FACTOR if fact.requires_grad else 1))

    def cast(self, fact: NodeFacts) -> int:
        if self.by_memory:
            return 1 + (2 * fact.numel if fact.requires_grad else 0)
        nanoseconds = self.device.launch_ns + 6 * fact.numel / self.device.bytes_per_ns
        # Its backward casts the gradient the other way.
        return self._units(nanoseconds * (2 if fact.requires_grad else 1))

    @staticmethod
    def _units(nanoseconds: float) -> int:
        return max(1, round(nanoseconds / UNIT_NS))


def _is_free(node: fx.Node) -> bool:
    """Whether the op moves no data: its result shares storage with an operand."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    mutates = isinstance(node.target, compat.OpOverload) and (
        compat.schema(node.target).is_mutable
    )
    return not mutates and any(
        compat.storage_id(value) == compat.storage_id(n.meta["val"])
        for n in node.all_input_nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    )


def _rows(node: fx.Node, fact: NodeFacts) -> float:
    """Rows of a matrix product's first operand; infinite for any other op."""
    _, name, _ = split_key(fact.op)
    shape: Any = getattr(node.meta.get("val"), "shape", ())
    if name not in ("linear", "matmul", "mm", "addmm", "mv", "addmv"):
        return math.inf
    if len(shape) < 2:
        return 1
    second = node.args[1 if name != "addmm" else 2] if len(node.args) > 1 else None
    batched = isinstance(second, fx.Node) and len(second.meta["val"].shape) > 2
    if batched:
        return compat.hint(shape[-2])
    return math.prod(compat.hint(s) for s in shape[:-1])


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
