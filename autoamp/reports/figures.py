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
from autoamp.dtypes import HIGH_DTYPE, NARROWEST, rounding, short_name
from autoamp.messages import nanoseconds_text, not_captured, op_title
from autoamp.passes.decide.cost import (
    TRAINING_FACTOR,
    UNIT_NS,
    Parts,
    kind_of_product,
    parts_of,
)
from autoamp.passes.decide.devices import NEUTRAL
from autoamp.passes.decide.flops import flops_of
from autoamp.passes.decide.policies import POLICIES
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.report_rows import (
    ALL_FP32,
    AUTOCAST,
    OURS,
    CastRow,
    Costs,
    OpRow,
    Section,
    sections_of,
)
from autoamp.passes.rules import family
from autoamp.passes.see.facts import NodeFacts
from autoamp.reports.casts import CastCounts, cast_counts
from autoamp.training.meter import UpdateShare

SECONDS = UNIT_NS * 1e-9
"""A unit of prices in seconds."""


def pays(section: Section) -> bool:
    """Whether low precision is faster than fp32 on the device of a section."""
    return section.device is not NEUTRAL


def has_times(sections: Sequence[Section]) -> bool:
    """Whether the prices of all sections are times on a device.

    Where low precision is slower on the device but `do_no_harm=False` converts all the
    same, prices belong to no device.
    """
    return all(map(pays, sections))


# -- the predicted time ----------------------------------------------------------------


@dataclass(frozen=True)
class OpTime:
    """The predicted time of one float op, in fp32 and as placed."""

    section: Section
    row: OpRow

    @cached_property
    def high(self) -> Parts:
        """The parts of its time in fp32, in nanoseconds."""
        return self._parts(HIGH_DTYPE)

    @cached_property
    def placed(self) -> Parts:
        """The parts of its time as placed."""
        return self._parts(
            self.section.rewritten.low if self.row.is_low else HIGH_DTYPE
        )

    def _parts(self, dtype: torch.dtype) -> Parts:
        return parts_of(self._node, self._fact, dtype.itemsize, self.section.device)

    @property
    def by_weights(self) -> float:
        """The share of its bytes that are weights: a larger batch reads no more."""
        facts, fact = self.section.rewritten.facts, self._fact
        read = [o.value for o in fact.operands if o.value in facts.weights]
        weights, total = (
            sum(facts.nodes[v].numel for v in read),
            self.row.reads + fact.numel,
        )
        return min(1.0, weights / total) if total else 0.0

    @property
    def kernel(self) -> tuple[int, ...]:
        """The sizes of a convolution's kernel; () for another op."""
        if self._fact.base not in family("convolution"):
            return ()
        weight = self._node.all_input_nodes[1].meta["val"]
        return tuple(compat.hint(size) for size in weight.shape[2:])

    def at(self, times: float, *, placed: bool) -> Parts:
        """The parts at `times` times the batch."""
        parts = self.placed if placed else self.high
        grows = self.by_weights + (1 - self.by_weights) * times
        return Parts(parts.launch, parts.memory * grows, parts.arithmetic * times)

    @property
    def _node(self) -> fx.Node:
        return self.section.before[self.row.name]

    @property
    def _fact(self) -> NodeFacts:
        return self.section.rewritten.facts.nodes[self.row.name]


@dataclass(frozen=True)
class TimeOfClass:
    """Predicted seconds of one class of ops, or of the casts, and their number."""

    title: str
    ops: int
    fp32: float
    placed: float


@dataclass(frozen=True)
class Prediction:
    """Predicted times of one run of all graphs, forward, and backward where recorded.

    The price model of `decide/cost.py` gives each op a launch plus the larger of bytes
    over bandwidth and flops over peak.  Work outside of graphs (the optimizer's step,
    the loading of data) does not count; a loop's body counts as run once.

    Attributes:
        device: the device's name, with the products that fp32 computes in TF32 there.
        ops: every float op.
        cast_count, cast_units: the casts as placed, their time in units of 0.1 ns.
    """

    device: str
    ops: tuple[OpTime, ...]
    cast_count: int
    cast_units: int

    @property
    def fp32(self) -> float:
        """Seconds with every op in fp32."""
        return sum(op.row.cost_fp32 for op in self.ops) * SECONDS

    @property
    def placed(self) -> float:
        """Seconds as placed, casts included."""
        return (sum(op.row.cost for op in self.ops) + self.cast_units) * SECONDS

    @property
    def casts(self) -> float:
        """Seconds of the casts."""
        return self.cast_units * SECONDS

    @property
    def classes(self) -> tuple[TimeOfClass, ...]:
        """The times of products, of other ops and of casts."""
        rows = [op.row for op in self.ops]
        parts = {
            "matrix products, convolutions, attention": [r for r in rows if r.flops],
            "all other float ops": [row for row in rows if not row.flops],
        }
        classes = []
        for title, part in parts.items():
            fp32, placed = sum(r.cost_fp32 for r in part), sum(r.cost for r in part)
            times = fp32 * SECONDS, placed * SECONDS
            classes.append(TimeOfClass(title, len(part), *times))
        return (*classes, TimeOfClass("casts", self.cast_count, 0.0, self.casts))

    @property
    def share_low(self) -> float:
        """The share of the fp32 time in the ops that run low, 0 to 1."""
        return self._share([op.row for op in self.ops if op.row.is_low])

    @property
    def share_that_may_be_low(self) -> float:
        """The share of the fp32 time in ops that may run in low precision, 0 to 1."""
        return self._share([op.row for op in self.ops if not op.row.pinned])

    def _share(self, rows: Iterable[OpRow]) -> float:
        total = sum(op.row.cost_fp32 for op in self.ops)
        return sum(row.cost_fp32 for row in rows) / total if total else 0.0

    @property
    def speed_up(self) -> float:
        """How many times faster than fp32 the graphs are predicted to be."""
        return self.fp32 / self.placed if self.placed else 1.0

    @property
    def limit(self) -> float:
        """The speed-up if ops that may be low took no time at all (Amdahl's law)."""
        rest = 1 - self.share_that_may_be_low
        return 1 / rest if rest else float("inf")

    def seconds(self, *, placed: bool, times: float = 1.0) -> float:
        """The predicted time at `times` times the batch."""
        total = sum(op.at(times, placed=placed).nanoseconds for op in self.ops)
        return total * 1e-9 + (self.casts * times if placed else 0.0)

    def shares(self, *, placed: bool) -> dict[str, float]:
        """The shares of the time: `launches`, `memory`, `arithmetic` and `casts`.

        The time of an op beyond its start counts for the larger of its bytes and its
        flops.
        """
        spent = {"launches": 0.0, "memory": 0.0, "arithmetic": 0.0, "casts": 0.0}
        for op in self.ops:
            parts = op.placed if placed else op.high
            spent["launches"] += parts.launch
            bound = "memory" if parts.memory >= parts.arithmetic else "arithmetic"
            spent[bound] += max(parts.memory, parts.arithmetic)
        if placed:
            spent["casts"] = self.casts * 1e9
        total = sum(spent.values())
        return {name: part / total if total else 0.0 for name, part in spent.items()}


def predict(sections: Sequence[Section]) -> Prediction | None:
    """The prediction for all sections; None where prices are no times of a device."""
    if not sections or not has_times(sections):
        return None
    ops = tuple(OpTime(section, row) for section in sections for row in section.ops)
    ours = sum(section.costs.ours.estimate for section in sections)
    return Prediction(
        device=_hardware(sections),
        ops=ops,
        cast_count=sum(c.every_call for section in sections for c in section.casts),
        cast_units=ours - sum(op.row.cost for op in ops),
    )


_KINDS = {
    "matmul": "matrix products",
    "batched": "matrix products",
    "conv": "convolutions",
    "channelwise": "convolutions",
    "rnn": "recurrent layers",
}


def _hardware(sections: Sequence[Section]) -> str:
    """The device of the prices, and the products that fp32 computes in TF32 there."""
    device = sections[0].device
    kinds = {
        kind_of_product(s.before[row.name], s.rewritten.facts.nodes[row.name])
        for s in sections
        for row in s.ops
        if row.flops
    }
    met = [w for k, w in _KINDS.items() if k in kinds and device.allows_tf32(k)]
    in_tf32 = f", fp32 {' and '.join(dict.fromkeys(met))} in TF32" if met else ""
    return device.name + in_tf32


@dataclass(frozen=True)
class Headline:
    """The figures of the summary, which docs/report.schema.json describes one by one.

    Times are those of the prediction, None where no time is predicted; a body of a loop
    counts as run once.
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
        return self._faster_than(self.seconds_fp32)

    @property
    def speed_up_over_autocast(self) -> float | None:
        """How many times as fast as with autocast's placement; None as `speed_up`."""
        return self._faster_than(self.seconds_autocast)

    def _faster_than(self, other: float | None) -> float | None:
        if other is None or self.seconds is None:
            return None
        return other / self.seconds if self.seconds else 1.0

    def figures(self) -> dict[str, Any]:
        """Every figure by its name."""
        return _by_name(self, "speed_up", "speed_up_over_autocast")


def _by_name(figures: Headline | Coverage, *ratios: str) -> dict[str, Any]:
    return {**asdict(figures), **{name: getattr(figures, name) for name in ratios}}


def headline_of(sections: Sequence[Section], predicted: Prediction | None) -> Headline:
    """The figures of all sections."""
    ops = [row for section in sections for row in section.ops]
    kept_fp32, kept_autocast, kept = (
        sum(section.costs.placements[name].kept for section in sections)
        for name in (ALL_FP32, AUTOCAST, OURS)
    )
    estimates = (s.costs.placements[AUTOCAST].estimate for s in sections)
    seconds = sum(estimates) * SECONDS
    launches = sum(map(_launches, sections)) * SECONDS
    return Headline(
        low_ops=sum(row.is_low for row in ops),
        float_ops=len(ops),
        share_of_time_low=predicted.share_low if predicted else None,
        trains=kept_fp32 > 0,
        pays=all(map(pays, sections)),
        device=predicted.device if predicted else "",
        seconds_fp32=predicted.fp32 if predicted else None,
        seconds_autocast=seconds if predicted else None,
        seconds=predicted.placed if predicted else None,
        seconds_of_launches=launches if predicted else None,
        kept_fp32=kept_fp32,
        kept_autocast=kept_autocast,
        kept=kept,
    )


def _launches(section: Section) -> int:
    """The price of starting every op in fp32, in the forward and in the backward."""
    start = round(section.device.launch_ns / UNIT_NS)
    return sum(
        min(row.cost_fp32, start * (TRAINING_FACTOR if row.trains else 1))
        for row in section.ops
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


def stayed_groups(sections: Sequence[Section]) -> tuple[Stayed, ...]:
    """The ops in fp32 by reason, the reason that costs most first."""
    timed = has_times(sections)
    groups: dict[str, list[OpRow]] = defaultdict(list)
    for row in (row for section in sections for row in section.ops):
        if not row.is_low:
            groups[row.heading].append(row)

    def weight(*rows: OpRow) -> tuple[int, int]:
        time = sum(row.cost_fp32 for row in rows) if timed else 0
        return time, sum(row.bytes for row in rows)

    stayed = []
    for reason, rows in groups.items():
        kinds: dict[str, list[OpRow]] = defaultdict(list)
        for row in rows:
            kinds[op_title(row.op)].append(row)
        ops = sorted(kinds, key=lambda name: weight(*kinds[name]), reverse=True)
        units, size = weight(*rows)
        seconds = units * SECONDS if timed else None
        rows.sort(key=weight, reverse=True)
        stayed.append(Stayed(reason, tuple(rows), tuple(ops), seconds, size))
    return tuple(sorted(stayed, key=lambda g: (-(g.seconds or 0), -g.bytes)))


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
    islands = [island for section in sections for island in _islands(section)]
    return sorted(islands, key=lambda island: -island.bytes)


def _islands(section: Section) -> Iterator[Island]:
    rows = {row.name: row for row in section.ops}
    facts = section.rewritten.facts
    flow = nx.DiGraph()
    flow.add_nodes_from(rows)
    for name in rows:
        makers = [facts.maker(each.value) for each in facts.nodes[name].operands]
        flow.add_edges_from((maker, name) for maker in makers if maker in rows)
    high = [name for name, row in rows.items() if not row.is_low]
    place = {name: number for number, name in enumerate(rows)}
    components = nx.weakly_connected_components(flow.subgraph(high))
    # A component is a set, whose order differs from process to process.
    for places in sorted(sorted(map(place.__getitem__, names)) for names in components):
        yield _island(flow, [section.ops[number] for number in places])


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


# -- weights ---------------------------------------------------------------------------

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
    ranges: dict[str, Range] = {}
    for name, weight in weights.items():
        if weight.dtype != torch.float32 or not _holds_data(weight):
            continue
        with torch.no_grad():
            size = weight.detach().abs()
            low = size.to(NARROWEST)
            norm = float(size.double().norm())
            error = float((low.double() - size.double()).norm())
            ranges[name] = Range(
                largest=float(size.max()),
                too_large=int((low.isinf() & size.isfinite()).sum()),
                lost=int(((low == 0) & (size != 0)).sum()),
                count=weight.numel(),
                error=error / norm if norm else 0.0,
            )
    return ranges


def _holds_data(weight: torch.Tensor) -> bool:
    """Whether the elements can be read; the memory of an offloaded weight is gone."""
    if weight.is_meta or not weight.numel():
        return False
    steps = zip(weight.shape, weight.stride(), strict=True)
    last = weight.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    nbytes: int = weight.untyped_storage().nbytes()
    return nbytes >= (last + 1) * weight.element_size()


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
            span = ranges.get(name) if cast.dtype == short_name(NARROWEST) else None
            where = section.graph, section.body
            rows.append(
                WeightRow(*where, name, cast.dtype, shape, not cast.every_call, span)
            )
    return rows


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
        return _by_name(self, "share_of_calls", "share_of_flops")


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


@dataclass(frozen=True)
class StepMemory:
    """What a training step holds in memory at some time, in bytes.

    No schedule is simulated: the sum is the most that these can come to.

    Attributes:
        weights: parameters and buffers.
        copies: the low copies of weights.
        gradients: one for each weight that is trained.
        kept: what autograd keeps for the backward, without weights and copies.
        is_counted: whether `kept` was counted on the graphs that run; otherwise it is
            the most that it can be.
    """

    weights: int
    copies: int
    gradients: int
    kept: int
    is_counted: bool

    @property
    def states(self) -> dict[str, int]:
        """The state of an optimizer, by its class: so many numbers for each gradient's.

        Counts of steps are left out.
        """
        one = self.gradients
        return {"Adam": 2 * one, "SGD with momentum": one, "SGD": 0}

    def total(self, optimizer: str) -> int:
        """All of it together, with the state of one of the `states`."""
        there = self.weights + self.copies + self.gradients + self.kept
        return there + self.states[optimizer]

    def figures(self) -> dict[str, Any]:
        """Every figure by its name."""
        return {**asdict(self), "states": self.states}


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
    updates: Sequence[UpdateShare] = ()
    memory: StepMemory | None = None

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The graphs, each followed by its bodies: checkpointed regions, loops."""
        return sections_of(self.rewritten, self.graphs)

    @cached_property
    def ops(self) -> list[OpRow]:
        """One row per float op, with category, precision, reason and source line."""
        return [row for section in self.sections for row in section.ops]

    @cached_property
    def casts(self) -> list[CastRow]:
        """One row per inserted cast, with kind and bytes."""
        return [row for section in self.sections for row in section.casts]

    @cached_property
    def cast_counts(self) -> CastCounts:
        """The number of casts that one forward and one backward over the graphs run."""
        return cast_counts(self.sections)

    @cached_property
    def islands(self) -> list[Island]:
        """Connected ops in fp32, with the ops that decided it, the largest first."""
        return islands_of(self.sections)

    @cached_property
    def weights(self) -> list[WeightRow]:
        """One row per weight read in low precision: its shape, and whether it fits."""
        return weight_rows(self.sections, self.ranges)

    @cached_property
    def prediction(self) -> Prediction | None:
        """Predicted times; None where none is predicted, as for "memory"."""
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

        Under `do_no_harm=False` each allow op that is left in fp32 adds a penalty
        larger than all other costs together.
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


def amount(units: int, *, signed: bool = False) -> str:
    """Prices as text: `1.25 ms`, `+310 ns`."""
    sign = "-" if units < 0 else "+" if signed else ""
    return f"{sign}{nanoseconds_text(abs(units) * UNIT_NS)}"
