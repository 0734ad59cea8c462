"""The price model: the cost of each op in each precision, and of each cast.

The model is a roofline of the device: an op takes a launch plus the larger of its bytes
over the bandwidth and its flops over the peak.  The figures rank placements, and give
orders of magnitude of times.  Prices are integers of 0.1 ns, because a min-cut needs
exact sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.errors import PassError
from autoamp.passes.decide.devices import NEUTRAL, Device
from autoamp.passes.decide.flops import flops_of
from autoamp.passes.decide.kept_values import kept_values
from autoamp.passes.decide.mincut import Share
from autoamp.passes.decide.sums import PYTHON_NS, keeps_sums
from autoamp.passes.decide.verdict import GAVE_UP, Classified, Verdict
from autoamp.passes.rules import family
from autoamp.passes.see.dtensors_as_whole import COMPUTED, MESH_CALL, MeshCall
from autoamp.passes.see.facts import NodeFacts

UNIT_NS = 0.1
"""Nanoseconds per unit of price."""

TRAINING_FACTOR = 3
"""Forward plus backward: a matmul's backward is two products of the same size, and a
pointwise op's backward reads and writes about twice as much as its forward."""


MEMORY_OVER_LINK = 5
"""The bandwidth of a device's memory over that of its link to another device, at least.

By NVIDIA's data sheets, one way: V100 900 GB/s over 150 GB/s (NVLink 2), A100 SXM
1,555 over 300 (NVLink 3), H100 SXM 3,350 over 450 (NVLink 4), B200 8,000 over 900
(NVLink 5).  Other links are slower; a placement that spares bytes there spares more.
"""


@dataclass(frozen=True)
class Prices:
    """Prices of one graph, in units of 0.1 ns.

    Attributes:
        ops: node to (cost in fp32, cost in the low dtype).
        down, up: value to the cost of one cast of it.
        wide: value to the cost of having its product write it in fp32, for low products
            that can; it stands in the place of a cast up for all readers.
        reward: the amount added to the fp32 cost of every allow op, 0 with do_no_harm.
        device: the roofline behind the prices.
        byte: the price of a byte that outweighs all ops and casts together.
        kept: the bytes that are kept for the backward, value by value.
    """

    ops: Mapping[str, tuple[int, int]]
    down: Mapping[str, int]
    up: Mapping[str, int]
    reward: int
    device: Device
    byte: int
    wide: Mapping[str, int] = field(default_factory=dict)
    kept: tuple[Share, ...] = ()


def price_graph(
    gm: fx.GraphModule,
    classified: Classified,
    device: Device,
    *,
    do_no_harm: bool,
    free_weights: bool,
) -> Prices:
    """Prices every op and every possible cast of a graph.

    Args:
        do_no_harm: False adds `reward` to the fp32 cost of every allow op, more than
            all other prices of the graph together, so that the op is low wherever that
            is legal.
        free_weights: whether weights cost nothing to cast, because the graph is called
            with low copies that are kept.
    """
    low_itemsize, here = device.low_itemsize, device
    if not do_no_harm and not device.pays:
        device = NEUTRAL
    facts, verdicts = classified.facts, classified.verdicts
    model = _Model(device, low_itemsize)
    nodes = {n.name: n for n in gm.graph.nodes}
    ops = {n: model.priced(nodes[n], facts.nodes[n], v) for n, v in verdicts.items()}
    for name, verdict in verdicts.items():
        # A node such as the model's own cast to bf16 is the same with either label.
        if not facts.nodes[name].makes_floats and set(verdict.modes) <= {"any", "high"}:
            ops[name] = (ops[name][0], ops[name][0])
    values = [f for f in facts.nodes.values() if f.is_value]
    casts = {f.name: model.cast(f) for f in values}
    down = dict(casts)
    # Low outside of a body, these are read low at no price; the graph round the body
    # casts them up for a reader in fp32.
    given_low = facts.low_outside & facts.constants & casts.keys()
    down.update(dict.fromkeys(given_low, 0))
    for name in verdicts:
        high, low = ops[name]
        read = {operand.value for operand in facts.nodes[name].operands}
        ops[name] = (high + sum(casts[value] for value in given_low & read), low)
    if free_weights:
        # One copy serves until the optimizer's next step.
        down.update(dict.fromkeys(facts.weights & casts.keys(), 0))
    kept = kept_values(gm, classified, low_itemsize)
    # Twice, since a value may be cast both ways.
    byte = 1 + sum(a + b for a, b in ops.values()) + 2 * sum(casts.values())
    reward = 0
    if not do_no_harm:
        # No saving of time or bytes outweighs one allow op.
        reward = byte * (1 + sum(each.at_source + each.at_sink for each in kept))
        for name in filter(classified.is_allowed, verdicts):
            high, low = ops[name]
            ops[name] = (high + reward, low)
    wide = {
        f.name: min(model.wide(f), casts[f.name])
        for f in values
        if keeps_sums(nodes[f.name], here, grad=f.requires_grad)
    }
    return Prices(ops, down, casts, reward, device, byte, wide, kept)


def as_authors_ask(prices: Prices, classified: Classified) -> Prices:
    """The prices, changed so that custom ops whose authors ask for low are low.

    The cost of a custom op is unknown.  Where the author has registered autocast for
    the op, its fp32 price becomes higher than its low price with all its casts.
    """
    facts, ops = classified.facts, dict(prices.ops)
    asked = [n for n, verdict in classified.verdicts.items() if verdict.asked]
    if not asked:
        return prices
    uses: Counter[str] = Counter(facts.returned)
    for name in classified.verdicts:
        uses.update(operand.value for operand in facts.nodes[name].operands)
    for name in asked:
        high, low = ops[name]
        casts = sum(prices.down[o.value] for o in facts.nodes[name].operands)
        made = [v for v in prices.up if facts.producer(v) == name]
        # At worst each reader needs a cast of its own: regions share none.
        casts += sum(uses[value] * prices.up[value] for value in made)
        ops[name] = (max(high, low + casts + 1), low)
    return replace(prices, ops=ops)


class _Model:
    def __init__(self, device: Device, low_itemsize: int) -> None:
        self.device = device
        self.high, self.low = HIGH_DTYPE.itemsize, low_itemsize

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
        flops = _numbers_of(node, fact)
        high, low = (
            self._units(_parts(node, fact, size, self.device, flops).nanoseconds)
            for size in (self.high, self.low)
        )
        return high, low

    def cast(self, fact: NodeFacts) -> int:
        # The backward of a cast casts the gradient the other way.
        return self._units(self._cast_ns(fact) * (2 if fact.requires_grad else 1))

    def wide(self, fact: NodeFacts) -> int:
        """The cost of a low product that writes fp32 numbers, beyond a low result's."""
        more = (self.high - self.low) * fact.numel / self.device.bytes_per_ns
        # The backward rounds the gradient, as that of a cast does.
        back = PYTHON_NS + self._cast_ns(fact) if fact.requires_grad else 0.0
        return self._units(more + back)

    def _cast_ns(self, fact: NodeFacts) -> float:
        moved = (self.high + self.low) * fact.numel
        return self.device.launch_ns + moved / self.device.cast_bandwidth(moved)

    @staticmethod
    def _units(nanoseconds: float) -> int:
        # A price that rounds to 0 would make the work look free.
        return max(1, round(nanoseconds / UNIT_NS)) if nanoseconds else 0


@dataclass(frozen=True)
class Parts:
    """The parts of one op's predicted time, in nanoseconds, its backward included.

    Attributes:
        launch: for starting kernels.
        memory: for the bytes that the op reads and writes.
        arithmetic: for the flops of products, which run while memory is moved.
    """

    launch: float
    memory: float
    arithmetic: float

    @property
    def nanoseconds(self) -> float:
        """The time of the op: its start, and the longer of memory and arithmetic."""
        return self.launch + max(self.memory, self.arithmetic)


def parts_of(node: fx.Node, fact: NodeFacts, itemsize: int, device: Device) -> Parts:
    """The parts of an op's time on a device.

    Args:
        itemsize: bytes of one number in the op's precision.
    """
    return _parts(node, fact, itemsize, device, _numbers_of(node, fact))


def _parts(
    node: fx.Node, fact: NodeFacts, itemsize: int, device: Device, flops: float | None
) -> Parts:
    """As `parts_of`, of an op whose `_numbers_of` are known."""
    if flops is None:
        return Parts(0.0, 0.0, 0.0)
    times = TRAINING_FACTOR if fact.requires_grad else 1
    low = itemsize < HIGH_DTYPE.itemsize
    moved = itemsize * (fact.read_numel + fact.numel)
    if MESH_CALL in node.meta and not fact.op.startswith("aten"):
        # A call between ranks, over the quickest link that there may be.
        call: MeshCall = node.meta[MESH_CALL]
        times = call.sends + (call.sends_back and fact.requires_grad)
        sent = times * moved * MEMORY_OVER_LINK / device.bytes_per_ns
        return Parts(times * device.launch_ns, sent, 0.0)
    if not flops:
        heavy = fact.base.rstrip("_") in family("function_of_each_number")
        bandwidth = device.bandwidth(moved, low=low, heavy=heavy)
        return Parts(times * device.launch_ns, times * moved / bandwidth, 0.0)
    rate = device.flops_per_ns(kind_of_product(node, fact), _rows(node, fact), low=low)
    start = device.launch_ns + (device.low if low else device.high).start_ns
    return Parts(
        times * start, times * moved / device.bytes_per_ns, times * flops / rate
    )


def _numbers_of(node: fx.Node, fact: NodeFacts) -> float | None:
    """The flops of an op, the same in each precision; None where it is free."""
    if _is_free(node):
        return None
    if MESH_CALL in node.meta and not fact.op.startswith("aten"):
        return 0.0
    return flops_of(node, fact) * float(node.meta.get(COMPUTED, 1.0))


def kind_of_product(node: fx.Node, fact: NodeFacts) -> str:
    """The kind of an op's products, as `Device.flops_per_ns` takes it."""
    op = fact.base.rstrip("_")
    if op in family("convolution"):
        weight = node.args[1] if len(node.args) > 1 else None
        value = weight.meta["val"] if isinstance(weight, fx.Node) else None
        # Each result reads one channel: the weight is (results, channels of a group,
        # ...).
        if isinstance(value, torch.Tensor) and value.dim() > 2 and value.shape[1] == 1:
            return "channelwise"
        return "conv"
    if op in family("transposed_convolution"):
        return "conv"
    if op in family("recurrent"):
        return "rnn"
    if op in family("attention") or _second_is_batched(node, op):
        return "batched"
    return "matmul"


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
    op = fact.base.rstrip("_")
    shape: Any = getattr(node.meta.get("val"), "shape", ())
    if op in family("attention") and len(shape) > 1:
        return compat.hint(shape[-2])
    if op not in family("product_of_rows"):
        return math.inf
    if len(shape) < 2:
        return 1
    if _second_is_batched(node, op):
        return compat.hint(shape[-2])
    return math.prod(compat.hint(s) for s in shape[:-1])


def _second_is_batched(node: fx.Node, op: str) -> bool:
    """Whether the second matrix of a product is another one for each of a batch."""
    at = 2 if op in family("product_added") else 1
    second = node.args[at] if len(node.args) > at else None
    value = second.meta.get("val") if isinstance(second, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() > 2
