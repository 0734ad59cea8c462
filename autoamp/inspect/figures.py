"""The figures of a report, as functions of its rows: `Document` holds them all.

Text, JSON, page and graph exports read a `Document`, so that all of them show the same
figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

import networkx as nx
import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.facts import NodeFacts
from autoamp.dtypes import HIGH_DTYPE, NARROWEST, rounding, short_name
from autoamp.inspect.casts import (
    CastCounts,
    CompiledCasts,
    cast_counts,
    compiled_casts,
)
from autoamp.inspect.rows import AUTOCAST, Costs, Section, sections_of
from autoamp.inspect.text import not_captured, op_title
from autoamp.op_names import split_key
from autoamp.place.cost import (
    TRAINING_FACTOR,
    UNIT_NS,
    Parts,
    kind_of_product,
    parts_of,
)
from autoamp.place.devices import NEUTRAL, Device
from autoamp.place.flops import flops_of
from autoamp.place.frontier import Frontier
from autoamp.place.policies import POLICIES
from autoamp.rewrite.rewritten import Rewritten
from autoamp.rules import family
from autoamp.saved.rows import CastRow, OpRow

SECONDS = UNIT_NS * 1e-9
"""A unit of prices in seconds."""


def pays(section: Section) -> bool:
    """Whether low precision is faster than fp32 on the device of a section."""
    return section.rewritten.assignment.prices.device is not NEUTRAL


def has_times(sections: Sequence[Section]) -> bool:
    """Whether the prices of all sections are times on a device, and not bytes."""
    return all(
        pays(section) and not section.rewritten.assignment.prices.in_bytes
        for section in sections
    )


# -- the predicted time ----------------------------------------------------------------

PRODUCTS, OTHERS, CASTS = (
    "matrix products, convolutions, attention",
    "all other float ops",
    "casts",
)


@dataclass(frozen=True)
class TimeOfClass:
    """Predicted times of one class of ops: `PRODUCTS`, `OTHERS` or `CASTS`.

    Attributes:
        title: the class.
        ops: number of ops, or of casts.
        fp32: seconds with every op in fp32.
        placed: seconds as placed.
        may_be_low: the part of `fp32` in ops that may run in low precision.
    """

    title: str
    ops: int
    fp32: float
    placed: float
    may_be_low: float


@dataclass(frozen=True)
class Prediction:
    """Predicted times of one run of all graphs, forward, and backward where recorded.

    The price model of `place/cost.py` gives each op a launch plus the larger of bytes
    over bandwidth and flops over peak.  Work outside of graphs (the optimizer's step,
    the loading of data) does not count.

    Attributes:
        device: the device whose figures are used.
        classes: the times of the classes of ops.
        units_fp32, units_placed: the time with every op in fp32, and as placed with the
            casts, in units of 0.1 ns.
    """

    device: str
    classes: tuple[TimeOfClass, ...]
    units_fp32: int
    units_placed: int

    @property
    def fp32(self) -> float:
        """Seconds with every op in fp32."""
        return self.units_fp32 * SECONDS

    @property
    def placed(self) -> float:
        """Seconds as placed, casts included."""
        return self.units_placed * SECONDS

    @property
    def casts(self) -> float:
        """Seconds of the casts."""
        return sum(each.placed for each in self.classes if each.title == CASTS)

    @property
    def speed_up(self) -> float:
        """How many times faster than fp32 the graphs are predicted to be."""
        return self.fp32 / self.placed if self.placed else 1.0

    @property
    def share_that_may_be_low(self) -> float:
        """The share of the fp32 time in ops that may run in low precision, 0 to 1."""
        touched = sum(each.may_be_low for each in self.classes)
        return touched / self.fp32 if self.fp32 else 0.0

    @property
    def limit(self) -> float:
        """The speed-up if ops that may be low took no time at all (Amdahl's law)."""
        rest = 1 - self.share_that_may_be_low
        return 1 / rest if rest else float("inf")


def predict(sections: Sequence[Section]) -> Prediction | None:
    """The prediction for all sections; a loop's body counts as run once.

    None without graphs, under `objective="memory"`, and where low precision is slower
    on the device but `do_no_harm=False` converts all the same: then the prices belong
    to no device.
    """
    if not sections or not has_times(sections):
        return None
    totals = {title: [0, 0, 0, 0] for title in (PRODUCTS, OTHERS, CASTS)}
    for section in sections:
        for row in section.ops:
            total = totals[PRODUCTS if row.flops else OTHERS]
            total[0] += 1
            total[1] += row.cost_fp32
            total[2] += row.cost
            total[3] += 0 if row.pinned else row.cost_fp32
        casts = section.costs.ours.estimate - sum(row.cost for row in section.ops)
        totals[CASTS][0] += sum(cast.every_call for cast in section.casts)
        totals[CASTS][2] += casts
    classes = tuple(
        TimeOfClass(title, ops, fp32 * SECONDS, placed * SECONDS, low * SECONDS)
        for title, (ops, fp32, placed, low) in totals.items()
    )
    _, all_high, ours, _ = map(sum, zip(*totals.values(), strict=True))
    return Prediction(_hardware(sections), classes, all_high, ours)


_KINDS = {
    "matmul": "matrix products",
    "batched": "matrix products",
    "conv": "convolutions",
    "channelwise": "convolutions",
    "rnn": "recurrent layers",
}


def _hardware(sections: Sequence[Section]) -> str:
    """The device of the prices, and the products that fp32 computes in TF32 there."""
    device = sections[0].rewritten.assignment.prices.device
    kinds = {
        kind_of_product(
            section.before[row.name], section.rewritten.facts.nodes[row.name]
        )
        for section in sections
        for row in section.ops
        if row.flops
    }
    met = [
        word
        for kind, word in _KINDS.items()
        if kind in kinds and device.allows_tf32(kind)
    ]
    told = f", fp32 {' and '.join(dict.fromkeys(met))} in TF32" if met else ""
    return device.name + told


@dataclass(frozen=True)
class Headline:
    """The figures of the summary, over all graphs of a report.

    Predicted times are of one run of all graphs: a forward, and a backward where
    gradients are recorded.

    Attributes:
        low_ops, float_ops: the number of ops in low precision, and of all float ops.
        share_of_time_low: the share of the predicted fp32 time in the ops that run low,
            0 to 1; None where no time is predicted.
        trains: whether any op records gradients.
        pays: whether low precision is faster than fp32 on the device; if not, ops run
            low only because of `do_no_harm=False`, and no time is predicted.
        device: the device for which times are predicted; "" where no time is.
        seconds_fp32, seconds_autocast, seconds: the predicted time with every op in
            fp32, with the ops placed as `torch.autocast` would place them, and as
            placed; None where no time is predicted.
        seconds_of_launches: the part of `seconds_fp32` in which ops are only started.
        kept_fp32, kept_autocast, kept: bytes of operands that the backward may read, in
            the same three ways; 0 where no gradient is recorded.
    """

    low_ops: int
    float_ops: int
    share_of_time_low: float | None
    trains: bool
    pays: bool
    device: str
    seconds_fp32: float | None
    seconds_autocast: float | None
    seconds: float | None
    seconds_of_launches: float | None
    kept_fp32: int
    kept_autocast: int
    kept: int

    @property
    def speed_up(self) -> float | None:
        """How many times as fast as fp32; None where no time is predicted."""
        return _ratio(self.seconds_fp32, self.seconds)

    @property
    def speed_up_over_autocast(self) -> float | None:
        """How many times as fast as with autocast's placement; None as `speed_up`."""
        return _ratio(self.seconds_autocast, self.seconds)

    def figures(self) -> dict[str, Any]:
        """Every figure by its name."""
        ratios = ("speed_up", "speed_up_over_autocast")
        return {**asdict(self), **{name: getattr(self, name) for name in ratios}}


def _ratio(before: float | None, after: float | None) -> float | None:
    if before is None or after is None:
        return None
    return before / after if after else 1.0


def headline_of(sections: Sequence[Section], predicted: Prediction | None) -> Headline:
    """The figures of all sections; a body of a loop counts as run once."""
    ops = [row for section in sections for row in section.ops]
    autocast = launches = kept_autocast = kept = 0
    for section in sections:
        by_autocast = section.costs.placements[AUTOCAST]
        kept += _kept(section, section.rewritten.assignment.low)
        kept_autocast += _kept(section, by_autocast.low)
        autocast += by_autocast.estimate
        launches += _launches(section)
    high_of_low = sum(row.cost_fp32 for row in ops if row.is_low)
    share = None
    if predicted:
        share = high_of_low / predicted.units_fp32 if predicted.units_fp32 else 0.0
    kept_fp32 = sum(_kept(section, frozenset()) for section in sections)
    return Headline(
        low_ops=sum(row.is_low for row in ops),
        float_ops=len(ops),
        share_of_time_low=share,
        trains=kept_fp32 > 0,
        pays=all(map(pays, sections)),
        device=predicted.device if predicted else "",
        seconds_fp32=predicted.fp32 if predicted else None,
        seconds_autocast=autocast * SECONDS if predicted else None,
        seconds=predicted.placed if predicted else None,
        seconds_of_launches=launches * SECONDS if predicted else None,
        kept_fp32=kept_fp32,
        kept_autocast=kept_autocast,
        kept=kept,
    )


def _kept(section: Section, low: frozenset[str]) -> int:
    """Bytes of operands that the backward may read if the ops `low` run low."""
    sizes = {True: section.rewritten.low.itemsize, False: HIGH_DTYPE.itemsize}
    return sum(sizes[row.name in low] * row.reads for row in section.ops if row.trains)


def _launches(section: Section) -> int:
    """The price of starting every op in fp32, in the forward and in the backward."""
    start = round(section.rewritten.assignment.prices.device.launch_ns / UNIT_NS)
    return sum(
        min(row.cost_fp32, start * (TRAINING_FACTOR if row.trains else 1))
        for row in section.ops
    )


# -- what bounds the predicted time ----------------------------------------------------


@dataclass(frozen=True)
class OpTime:
    """The predicted time of one float op, in fp32 and as placed.

    Attributes:
        row: the op.
        high, placed: the parts of its time, in nanoseconds.
        by_weights: the share of its bytes that belong to weights, 0 to 1; a larger
            batch does not read more of them.
        kernel: the sizes of a convolution's kernel; () for another op.
    """

    row: OpRow
    high: Parts
    placed: Parts
    by_weights: float
    kernel: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, str, str]:
        """The section and the name of the op."""
        return self.row.key

    @property
    def flops(self) -> int:
        """Flops of its forward."""
        return self.row.flops

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
        flops = {op.key: op.flops for op in self.ops if op.row.is_low}
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
    if not sections or not pays(sections[0]):
        return None
    on = sections[0].rewritten.assignment.prices.device
    ops = [_op_time(s, row, on) for s in sections for row in s.ops]
    return Bounds(on, tuple(ops), casts)


def _op_time(section: Section, row: OpRow, device: Device) -> OpTime:
    facts = section.rewritten.facts
    node, fact = section.before[row.name], facts.nodes[row.name]
    dtype = section.rewritten.low if row.is_low else HIGH_DTYPE
    values = [o.value for o in fact.operands if o.value in facts.weights]
    weights, total = sum(facts.nodes[v].numel for v in values), row.reads + fact.numel
    kernel: tuple[int, ...] = ()
    if fact.base in family("convolution"):
        weight = node.all_input_nodes[1].meta["val"]
        kernel = tuple(compat.hint(size) for size in weight.shape[2:])
    return OpTime(
        row,
        parts_of(node, fact, HIGH_DTYPE.itemsize, device),
        parts_of(node, fact, dtype.itemsize, device),
        min(1.0, weights / total) if total else 0.0,
        kernel,
    )


# -- the ops that stayed in fp32 -------------------------------------------------------


@dataclass(frozen=True)
class Stayed:
    """Ops that stayed in fp32 for one reason.

    Attributes:
        reason: a clause whose subject is the ops.
        rows: the ops, the costliest first.
        ops: the short names of the ops, the costliest first.
        seconds: their predicted time together; None where no time is predicted.
        bytes: fp32 bytes that they read and write.
    """

    reason: str
    rows: tuple[OpRow, ...]
    ops: tuple[str, ...]
    seconds: float | None
    bytes: int

    @property
    def count(self) -> int:
        """The number of the ops."""
        return len(self.rows)

    @property
    def costliest(self) -> OpRow:
        """The op with the largest part of the time, or else of the bytes."""
        return self.rows[0]


def stayed_groups(sections: Sequence[Section]) -> tuple[Stayed, ...]:
    """The ops in fp32 by reason, the reason that costs most first."""
    timed = has_times(sections)
    groups: dict[str, list[OpRow]] = defaultdict(list)
    for row in (row for section in sections for row in section.ops):
        if not row.is_low:
            groups[row.heading].append(row)
    found = [_stayed(reason, rows, timed) for reason, rows in groups.items()]
    return tuple(sorted(found, key=lambda g: (-(g.seconds or 0), -g.bytes)))


def _stayed(reason: str, rows: Sequence[OpRow], timed: bool) -> Stayed:
    def weight(row: OpRow) -> tuple[float, int]:
        return row.cost_fp32 * SECONDS if timed else 0.0, row.bytes

    totals: dict[str, tuple[float, int]] = {}
    for row in rows:
        name, (time, size) = op_title(row.op), weight(row)
        before = totals.get(name, (0.0, 0))
        totals[name] = before[0] + time, before[1] + size
    return Stayed(
        reason=reason,
        rows=tuple(sorted(rows, key=weight, reverse=True)),
        ops=tuple(sorted(totals, key=lambda name: totals[name], reverse=True)),
        seconds=sum(time for time, _ in totals.values()) if timed else None,
        bytes=sum(row.bytes for row in rows),
    )


@dataclass(frozen=True)
class Island:
    """Connected fp32 ops of one graph or body.

    Attributes:
        graph, body: the section of the ops.
        ops: the names of the ops, in graph order.
        decided_by: the names of the ops that must be fp32; the other ops of the island
            are fp32 because casts would cost more.  Empty where the whole island is
            fp32 because of prices alone.
        reasons: the reasons of the ops `decided_by`, each once, the most frequent
            first; where `decided_by` is empty, the reasons of all ops.
        modules: the paths of the modules that call the ops, each once.
        bytes: fp32 bytes that the ops read and write.
        casts: casts between the island and low ops.
        is_between: whether the island reads the results of low ops and low ops read
            the results of the island.
    """

    graph: int
    body: str
    ops: tuple[str, ...]
    decided_by: tuple[str, ...]
    reasons: tuple[str, ...]
    modules: tuple[str, ...]
    bytes: int
    casts: int
    is_between: bool


def islands_of(sections: Sequence[Section]) -> list[Island]:
    """The islands of all sections; the island that moves most bytes comes first."""
    found = [island for section in sections for island in _islands(section)]
    return sorted(found, key=lambda island: -island.bytes)


def _islands(section: Section) -> Iterator[Island]:
    rows = {row.name: row for row in section.ops}
    facts = section.rewritten.facts
    flow = nx.DiGraph()
    flow.add_nodes_from(rows)
    for name in rows:
        makers = [facts.maker(each.value) for each in facts.nodes[name].operands]
        flow.add_edges_from((maker, name) for maker in makers if maker in rows)
    high = [name for name, row in rows.items() if not row.is_low]
    order = {name: place for place, name in enumerate(rows)}
    components = nx.weakly_connected_components(flow.subgraph(high))
    # A component is a set, whose order differs from process to process.
    ordered = [sorted(names, key=order.__getitem__) for names in components]
    for names in sorted(ordered, key=lambda names: order[names[0]]):
        yield _island(flow, [rows[name] for name in names])


def _island(flow: nx.DiGraph, rows: Sequence[OpRow]) -> Island:
    names = [row.name for row in rows]
    inside = set(names)
    before = {a for n in names for a in flow.predecessors(n)} - inside
    after = {b for n in names for b in flow.successors(n)} - inside
    given_up = {n for n in inside if any(b not in inside for b in flow.successors(n))}
    decided = [row for row in rows if row.pinned]
    reasons = [row.heading for row in decided or rows]
    return Island(
        graph=rows[0].graph,
        body=rows[0].body,
        ops=tuple(names),
        decided_by=tuple(row.name for row in decided),
        reasons=tuple(sorted(dict.fromkeys(reasons), key=lambda r: -reasons.count(r))),
        modules=tuple(dict.fromkeys(row.module for row in rows if row.module)),
        bytes=sum(row.bytes for row in rows),
        casts=len(before) + len(given_up),
        is_between=bool(before and after),
    )


# -- weights and sizes -----------------------------------------------------------------

ROUNDING = rounding(NARROWEST)
"""The largest relative error by which fp16 rounds a number in its range."""


@dataclass(frozen=True)
class Range:
    """The magnitudes in one weight.

    Attributes:
        largest: the largest magnitude; NaN where the weight holds a NaN.
        too_large: how many numbers are infinite in fp16.
        lost: how many numbers other than 0 are 0 in fp16.
        count: how many numbers the weight has.
        error: the relative error of the fp16 copy, ||copy - weight|| / ||weight||.
    """

    largest: float
    too_large: int
    lost: int
    count: int
    error: float


@dataclass(frozen=True)
class WeightRow:
    """One weight that is read in low precision.

    Attributes:
        graph, body: the section that reads the weight.
        name: the weight's path in the model, "fc.weight".
        dtype: the short name of the low dtype.
        shape: the weight's shape, with hints for symbolic sizes.
        kept: whether the low copy is kept until the weight changes.
        range: the magnitudes in the weight, if the low dtype is fp16 and the weight
            holds data; else None (bf16 has the range of fp32).
    """

    graph: int
    body: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    kept: bool
    range: Range | None

    @property
    def fits(self) -> bool:
        """Whether the error of the weight's copy is no larger than that of rounding.

        A few numbers near 0 may become 0.
        """
        return self.range is None or self.range.error <= ROUNDING


def ranges_of(weights: Mapping[str, torch.Tensor]) -> dict[str, Range]:
    """The magnitudes of fp32 weights that hold data; one pass over each weight."""
    found: dict[str, Range] = {}
    for name, weight in weights.items():
        if weight.dtype != torch.float32 or not _holds_data(weight):
            continue
        with torch.no_grad():
            size = weight.detach().abs()
            low = size.to(NARROWEST)
            norm = float(size.double().norm())
            error = float((low.double() - size.double()).norm())
            found[name] = Range(
                largest=float(size.max()),
                too_large=int((low.isinf() & size.isfinite()).sum()),
                lost=int(((low == 0) & (size != 0)).sum()),
                count=weight.numel(),
                error=error / norm if norm else 0.0,
            )
    return found


def _holds_data(weight: torch.Tensor) -> bool:
    """Whether the elements can be read; the memory of an offloaded weight is gone."""
    if weight.is_meta or not weight.numel():
        return False
    steps = zip(weight.shape, weight.stride(), strict=True)
    last = weight.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    held: int = weight.untyped_storage().nbytes()
    return held >= (last + 1) * weight.element_size()


def weight_rows(
    sections: Sequence[Section], ranges: Mapping[str, Range]
) -> list[WeightRow]:
    """One row per weight and section that reads the weight in low precision."""
    rows = []
    for section in sections:
        for cast in section.casts:
            node = section.before.get(cast.value)
            if cast.kind != "weight" or node is None:
                continue
            name = node.meta.get("autoamp_path") or str(node.target)
            shape = tuple(node.meta["val"].shape)
            known = ranges.get(name) if cast.dtype == short_name(NARROWEST) else None
            where = section.graph, section.body
            rows.append(
                WeightRow(*where, name, cast.dtype, shape, not cast.every_call, known)
            )
    return rows


MULTIPLE = 8
"""Sizes of half-precision products should be multiples of 8: 16 bytes.

NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799), section 2.3: with
cuBLAS 11 and later tensor cores work for any size, most efficiently for multiples of 16
bytes.
"""


@dataclass(frozen=True)
class Misfit:
    """One size of one low matrix product or convolution.

    Attributes:
        graph, body: the section of the op.
        name: the name of the op's node.
        module: path of the module that calls the op.
        operand: the place of the operand, from 0.
        size: the size that is no multiple of `MULTIPLE`.
        next: the next multiple.
    """

    graph: int
    body: str
    name: str
    module: str
    operand: int
    size: int
    next: int


def misfits_of(sections: Sequence[Section]) -> list[Misfit]:
    """Sizes of low products on CUDA that miss the multiple, each once per module."""
    found: dict[tuple[str, int], Misfit] = {}
    for section in sections:
        for row in section.ops:
            fact = section.rewritten.facts.nodes[row.name]
            if not (row.is_low and row.flops and fact.device == "cuda"):
                continue
            for operand, size in _sizes(section.before[row.name], fact):
                above = size + -size % MULTIPLE
                misfit = Misfit(*row.key, row.module, operand, size, above)
                if size != above:
                    found.setdefault((row.module or row.name, size), misfit)
    return list(found.values())


def _sizes(node: fx.Node, fact: NodeFacts) -> Iterator[tuple[int, int]]:
    """The sizes of a product that matter, each with the place of its operand.

    These are the last two sizes of each matrix, and a convolution's channel counts.
    """
    _, name, _ = split_key(fact.op)
    for place, value in enumerate(node.args):
        tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            continue
        if "conv" not in name:
            yield from ((place, compat.hint(size)) for size in tensor.shape[-2:])
        elif place == 0:
            yield place, compat.hint(tensor.shape[1])
            yield 1, compat.hint(node.meta["val"].shape[1])


# -- calls and steps so far ------------------------------------------------------------


@dataclass(frozen=True)
class LossScaleReport:
    """The loss scaling of a model at the moment of the report.

    Attributes:
        kind: "DynamicLossScale", "StaticLossScale", or "NoLossScale" where the guard
            alone has skipped steps.
        scale: the factor by which gradients are multiplied inside the graphs.
        growth_tracker: steps without an overflow since the scale last moved.
        skipped_steps: number of optimizer steps skipped so far because of an overflow
            in the model: two optimizers that skip after one backward count two.
        skips: for each skipped step that is known, its number and the op whose
            gradient overflowed.
        foreign: whether an enabled GradScaler steps the model's optimizer, so that
            autoamp's loss scale is not in force.
    """

    kind: str
    scale: float
    growth_tracker: int
    skipped_steps: int
    skips: tuple[str, ...] = ()
    foreign: bool = False


@dataclass(frozen=True)
class Coverage:
    """How much of a model's work ran in low precision: counts over all calls so far.

    Attributes:
        calls: calls of the converted model.
        calls_aside: calls that ran no rewritten graph.
        calls_in_part: calls that ran rewritten graphs and also fp32 graphs, on which
            the pass failed.
        flops: flops of the matrix products, convolutions, attention and recurrent
            layers of the graphs, forward only, counted at each run of a graph.
        low_flops: the part of `flops` in low precision.
        parts_not_captured: functions and modules of which not all runs in graphs, and
            whose other flops nobody counts.
    """

    calls: int
    calls_aside: int
    calls_in_part: int
    flops: int
    low_flops: int
    parts_not_captured: int

    @property
    def share_of_calls(self) -> float:
        """The share of calls that ran rewritten graphs, 0 to 1; 1 before any call."""
        return 1 - self.calls_aside / self.calls if self.calls else 1.0

    @property
    def share_of_flops(self) -> float | None:
        """The share of flops in low precision, 0 to 1; None where `flops` is 0."""
        return self.low_flops / self.flops if self.flops else None

    def counts_and_shares(self) -> dict[str, float | None]:
        """Every attribute and share by its name."""
        shares = {n: getattr(self, n) for n in ("share_of_calls", "share_of_flops")}
        return {**asdict(self), **shares}


def coverage_of(
    calls: tuple[int, int, int],
    graphs: Iterable[tuple[Rewritten, Mapping[tuple[int, ...], int]]],
    skipped: Iterable[tuple[str, str]],
) -> Coverage:
    """The counts of one model.

    Args:
        calls: the calls, those aside and those in part.
        graphs: rewritten graphs, each with its number of runs by the values of its
            symbolic sizes, in the order of its inputs.
        skipped: the parts that were not converted, with the reasons.
    """
    flops = low_flops = 0
    for rewritten, ran in graphs:
        names = compat.size_symbols(rewritten.before)
        for sizes, runs in ran.items():
            values = dict(zip(names, sizes, strict=False))
            size = partial(compat.size_with, values=values)
            for record in rewritten.with_bodies():
                nodes = {n.name: n for n in record.before.graph.nodes}
                for name, decision in record.assignment.decisions.items():
                    count = flops_of(nodes[name], record.facts.nodes[name], size)
                    flops += runs * count
                    low_flops += runs * count if decision.low else 0
    return Coverage(*calls, flops, low_flops, len(not_captured(skipped)))


# -- all together ----------------------------------------------------------------------


@dataclass(frozen=True, repr=False, eq=False)
class Document:
    """What was done to a model; `Report` describes the attributes."""

    label: str
    rewritten: Sequence[Rewritten]
    graphs: Sequence[fx.GraphModule]
    skipped: Sequence[tuple[str, str]] = ()
    runs: int = 0
    loss_scale: LossScaleReport | None = None
    unwatched: int = 0
    coverage: Coverage | None = None
    ranges: Mapping[str, Range] = field(default_factory=dict)
    explained_for: str = ""

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The graphs, each followed by its bodies: checkpointed regions, loops."""
        return sections_of(self.rewritten, self.graphs)

    def section_of(self, row: OpRow) -> Section:
        """The section that a row belongs to."""
        place = row.graph, row.body
        return next(s for s in self.sections if (s.graph, s.body) == place)

    @cached_property
    def ops(self) -> list[OpRow]:
        """One row per float op, with category, precision, reason and source line."""
        return [row for section in self.sections for row in section.ops]

    @cached_property
    def casts(self) -> list[CastRow]:
        """One row per inserted cast, with kind and bytes."""
        return [row for section in self.sections for row in section.casts]

    @cached_property
    def frontier(self) -> Frontier | None:
        """What a budget for error was met with; None without `budget=`."""
        options = [each.options for each in self.rewritten]
        choices = [each.chosen for each in options if each is not None and each.chosen]
        return next((each.frontier for each in choices), None)

    @cached_property
    def cast_counts(self) -> CastCounts:
        """The number of casts that one forward and one backward over the graphs run."""
        return cast_counts(self.sections)

    @cached_property
    def compiled_casts(self) -> CompiledCasts | None:
        """What inductor makes of the casts; None where it compiles no graph."""
        return compiled_casts(self.sections)

    @cached_property
    def islands(self) -> list[Island]:
        """Connected ops in fp32, with the ops that decided it, the largest first."""
        return islands_of(self.sections)

    @cached_property
    def weights(self) -> list[WeightRow]:
        """One row per weight read in low precision: its shape, and whether it fits."""
        return weight_rows(self.sections, self.ranges)

    @cached_property
    def misfits(self) -> list[Misfit]:
        """Sizes of low products on a GPU that are no multiple for tensor cores."""
        return misfits_of(self.sections)

    @cached_property
    def prediction(self) -> Prediction | None:
        """Predicted times by class of op; None under `objective="memory"`."""
        return predict(self.sections)

    @cached_property
    def costs(self) -> tuple[Costs, ...]:
        """The costs of each section."""
        return tuple(section.costs for section in self.sections)

    @cached_property
    def headline(self) -> Headline:
        """The figures of the summary: what is low, and the predicted gain."""
        return headline_of(self.sections, self.prediction)

    @cached_property
    def bounds(self) -> Bounds | None:
        """What bounds the predicted time; None where no time is predicted."""
        if self.prediction is None:
            return None
        return bounds_of(self.sections, self.prediction.casts)

    @cached_property
    def stayed(self) -> tuple[Stayed, ...]:
        """The ops in fp32 by reason, the reason that costs most first."""
        return stayed_groups(self.sections)

    @property
    def compute_dtype(self) -> str | None:
        """Short name of the low dtype; None where nothing was rewritten."""
        return short_name(self.rewritten[0].low) if self.rewritten else None

    @property
    def cost(self) -> int:
        """The cost of the placement over all graphs, in units of 0.1 ns.

        Under `objective="memory"` the unit is bytes.  Under `do_no_harm=False` each
        allow op that is left in fp32 adds a penalty larger than all other costs
        together.
        """
        return sum(costs.ours.cost for costs in self.costs)

    @property
    def optimal_cost(self) -> int:
        """The least `cost` of any legal placement."""
        return sum(costs.optimal_cost for costs in self.costs)

    @property
    def regret(self) -> dict[str, int]:
        """Each other policy to its cost above the optimum, over all graphs."""
        return {
            name: sum(costs.regret[name] for costs in self.costs) for name in POLICIES
        }
