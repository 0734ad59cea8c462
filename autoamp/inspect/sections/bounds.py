"""What bounds the predicted time: starts of kernels, memory, or arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autoamp import compat
from autoamp.analyse.facts import Facts, NodeFacts
from autoamp.dtypes import HIGH_DTYPE
from autoamp.inspect.rows import Section
from autoamp.inspect.sections.dimensions import Misfit
from autoamp.place.cost import Parts, parts_of
from autoamp.place.devices import NEUTRAL, Device
from autoamp.place.flops import flops_of
from autoamp.rules import family


@dataclass(frozen=True)
class OpTime:
    """The predicted time of one float op, in fp32 and as placed.

    Attributes:
        graph, body, name: the section and the node of the op.
        op: its base name, such as "aten::linear".
        module: the path of the module that calls it.
        low: whether the op is placed low.
        high, placed: the parts of its time, in nanoseconds.
        flops: flops of its forward.
        by_weights: the share of its bytes that belong to weights, 0 to 1; a larger
            batch does not read more of them.
        kernel: the sizes of a convolution's kernel; () for another op.
    """

    graph: int
    body: str
    name: str
    op: str
    module: str
    low: bool
    high: Parts
    placed: Parts
    flops: int
    by_weights: float
    kernel: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, str, str]:
        """The section and the name."""
        return self.graph, self.body, self.name

    def at(self, times: float, *, placed: bool) -> Parts:
        """The parts at `times` times the batch."""
        parts = self.placed if placed else self.high
        grows = self.by_weights + (1 - self.by_weights) * times
        return Parts(parts.launch, parts.memory * grows, parts.arithmetic * times)


@dataclass(frozen=True)
class Bounds:
    """What bounds the predicted time of one run of all graphs, in seconds.

    Attributes:
        device: the device whose figures are used.
        ops: every float op.
        casts: the predicted time of the casts as placed.
    """

    device: Device
    ops: tuple[OpTime, ...]
    casts: float

    def seconds(self, *, placed: bool, times: float = 1.0) -> float:
        """The predicted time at `times` times the batch."""
        total = sum(op.at(times, placed=placed).nanoseconds for op in self.ops)
        return total * 1e-9 + (self.casts * times if placed else 0.0)

    def shares(self, *, placed: bool) -> dict[str, float]:
        """The shares of the time: `launches`, `memory`, `arithmetic` and `casts`.

        The time of an op beyond its start counts for the larger of its bytes and its
        flops.
        """
        found = {"launches": 0.0, "memory": 0.0, "arithmetic": 0.0, "casts": 0.0}
        for op in self.ops:
            parts = op.placed if placed else op.high
            found["launches"] += parts.launch
            bound = "memory" if parts.memory >= parts.arithmetic else "arithmetic"
            found[bound] += max(parts.memory, parts.arithmetic)
        if placed:
            found["casts"] = self.casts * 1e9
        total = sum(found.values())
        return {name: part / total if total else 0.0 for name, part in found.items()}

    def odd_product(self, misfits: Sequence[Misfit]) -> tuple[Misfit | None, float]:
        """The misfit of the most flops, and the share of low flops with any misfit."""
        flops = {op.key: op.flops for op in self.ops if op.low}
        odd = {(m.graph, m.body, m.name): m for m in misfits}
        touched = {key: flops[key] for key in odd if key in flops}
        every = sum(flops.values())
        if not touched or not every:
            return None, 0.0
        worst = max(touched, key=lambda key: touched[key])
        return odd[worst], sum(touched.values()) / every

    @property
    def largest(self) -> OpTime | None:
        """The op that takes the largest part of the fp32 time."""
        return max(self.ops, key=lambda op: op.high.nanoseconds, default=None)


def bounds_of(sections: Sequence[Section], casts: float) -> Bounds | None:
    """What bounds the time of all sections; None where prices belong to no device.

    Args:
        casts: seconds of all casts.
    """
    if not sections:
        return None
    prices = [section.rewritten.assignment.prices for section in sections]
    on = prices[0].device
    if on is NEUTRAL:
        return None
    ops = [op for section in sections for op in _op_times(section, on)]
    return Bounds(on, tuple(ops), casts)


def _op_times(section: Section, device: Device) -> Iterator[OpTime]:
    rewritten = section.rewritten
    for name in rewritten.assignment.decisions:
        node, fact = section.before[name], rewritten.facts.nodes[name]
        low = name in rewritten.assignment.low
        yield OpTime(
            section.graph,
            section.body,
            name,
            fact.base,
            fact.module,
            low,
            parts_of(node, fact, HIGH_DTYPE.itemsize, device),
            parts_of(
                node, fact, (rewritten.low if low else HIGH_DTYPE).itemsize, device
            ),
            flops_of(node, fact),
            _by_weights(rewritten.facts, fact),
            _kernel(node, fact),
        )


def _kernel(node: fx.Node, fact: NodeFacts) -> tuple[int, ...]:
    if fact.base not in family("convolution"):
        return ()
    weight = node.all_input_nodes[1].meta["val"]
    return tuple(compat.hint(size) for size in weight.shape[2:])


def _by_weights(facts: Facts, fact: NodeFacts) -> float:
    weights = sum(
        facts.nodes[operand.value].numel
        for operand in fact.operands
        if operand.value in facts.weights
    )
    total = fact.read_numel + fact.numel
    return min(1.0, weights / total) if total else 0.0
