"""The rows of a report: one per float op, one per cast, and the cost of each placement.

Text, JSON, page, Graphviz and `diff` read these rows, whether a report was made from
the records of the passes (`Section`) or read from a file (`saved_reports.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.messages import portable, portable_place
from autoamp.passes.decide.assign import (
    COSTS_CASTS,
    GAINS_NOTHING,
    Decision,
    legal_energy,
)
from autoamp.passes.decide.devices import Device
from autoamp.passes.decide.flops import flops_of
from autoamp.passes.decide.kept_values import kept_bytes
from autoamp.passes.decide.policies import POLICIES, project
from autoamp.passes.decide.verdict import CEILING
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.rules import Category
from autoamp.passes.see.nodes import KERNEL
from autoamp.passes.see.regions import LOWERED_BODY
from autoamp.passes.write.emitted import CAST_KIND
from autoamp.passes.write.for_compilers import CAST_FATE, EXACT_CASTS
from autoamp.passes.write.fp32_sums import is_wide

SCHEMA = "autoamp.report"
VERSION = 2
"""Raised when a key is removed or changes its meaning, not when a key is added."""

FP32 = short_name(HIGH_DTYPE)

_PLACE = re.compile(r"^.*?:\d+: ")


@dataclass(frozen=True)
class OpRow:
    """One float op: its precision and why.

    A file of an older version may lack all but the first eight attributes; those from
    `heading` on are in no file.

    Attributes:
        graph, body: the section of the op; `body` is "" outside bodies.
        name: the name of the op's node, the same before and after rewriting.
        op: the full op name, such as "aten::linear.default".
        precision: "fp32" or the low dtype's short name.
        reason: a sentence; never empty.
        module: path of the module that calls the op, "" at the top.
        source: "file:line: code" of the user's line, "" where unknown.
        category: allow, deny, infer or clear.
        origin: the rules file, user list or part of the pass behind the reason.
        listed: whether any rule knows the op.
        bytes: fp32 bytes that the op reads and writes; 0 for a view.
        kernel: the name of the kernel, where the op stands for a chain of the model's
            calls (`fuse=` takes its name), else "".
        calls: the number of the model's calls that the op stands for.
        cost_fp32, cost_low: the op's price in either precision, without casts and
            without the reward for lowering it, in the unit of its section: 0.1 ns or
            bytes.
        heading: the reason without the details of this op; ops are grouped by it.
        rule: the part of the reason that comes from the rule for the op's category.
        pinned: why the op must be fp32, "" if it may be low.
        flops: flops of its forward, for products.
        trains: whether a gradient flows through the op.
        reads: the numbers that it reads, which a backward may need.
    """

    graph: int
    body: str
    name: str
    op: str
    precision: str
    reason: str
    module: str
    source: str
    category: str = ""
    origin: str = ""
    listed: bool = True
    bytes: int = 0
    kernel: str = ""
    calls: int = 1
    cost_fp32: int = 0
    cost_low: int = 0
    heading: str = ""
    rule: str = ""
    pinned: str = ""
    flops: int = 0
    trains: bool = False
    reads: int = 0

    @property
    def is_low(self) -> bool:
        return self.precision != FP32

    @property
    def key(self) -> tuple[int, str, str]:
        """The section and the name."""
        return self.graph, self.body, self.name

    @property
    def cost(self) -> int:
        """The price in the op's precision."""
        return self.cost_low if self.is_low else self.cost_fp32

    @property
    def choice(self) -> str:
        """The part of the reason that comes from the placement, or ""."""
        return self.reason.removeprefix(self.rule).removeprefix("; ")

    @property
    def code(self) -> str:
        """The source line without its place, which moves when lines are added."""
        return _PLACE.sub("", self.source, count=1)


@dataclass(frozen=True)
class CastRow:
    """One inserted cast.

    Attributes:
        graph, body: the section of the cast.
        name: the name of the cast's node.
        value: the name of the node that is cast.
        kind: "weight", "down" or "up".
        dtype: the short name of the dtype cast to.
        bytes: bytes that the cast writes (a hint where the size is symbolic).
        every_call: False for a weight copy that is kept until the weight changes.
        producer: the op that made the value, such as "aten::add.Tensor"; "input" or
            "weight" for a value from outside the graph.
        readers: the names of the nodes that read the cast.
        source: the user's line that made the value, "" where unknown.
        compiled: what inductor makes of the cast: "written" to memory, "partly" (also
            read before it is written), "inside" a kernel or "removed"; "" where no
            compiler gets the graph or torch does not tell.
    """

    graph: int
    body: str
    name: str
    value: str
    kind: str
    dtype: str
    bytes: int
    every_call: bool = True
    producer: str = ""
    readers: tuple[str, ...] = ()
    source: str = ""
    compiled: str = ""


@dataclass(frozen=True)
class SavedGraph:
    """One graph of a saved report, or a body in a graph.

    Attributes:
        graph: index of the graph, in order of capture.
        body: "" for the graph itself, else the path of the body.
        device: the device for which ops are priced.
        ops, casts: in graph order.
    """

    graph: int
    body: str
    device: str
    ops: tuple[OpRow, ...]
    casts: tuple[CastRow, ...] = ()

    @property
    def key(self) -> str:
        """`0` for a graph, `0/body_0` for a body."""
        return f"{self.graph}/{self.body}" if self.body else str(self.graph)


@dataclass(frozen=True)
class SavedReport:
    """A saved report, as far as a comparison of reports reads it.

    Attributes:
        path: the file, as the user named it.
        model: the class name of the model.
        compute_dtype: short name of the low dtype; "" where nothing was rewritten.
        graphs: every graph followed by its bodies, in order of capture.
    """

    path: str
    model: str
    compute_dtype: str
    graphs: tuple[SavedGraph, ...]


# -- rows of the records of the passes ------------------------------------------------

OURS, ALL_FP32 = "ours", "all fp32"

AUTOCAST = "promote"
"""The policy that places casts as `torch.autocast` of the device does."""


@dataclass(frozen=True)
class Section:
    """One captured graph, or a body inside a graph: a checkpointed region, a loop.

    Attributes:
        graph: index of the captured graph.
        body: "" for the graph itself, else the path of the body ("body_0").
        rewritten: the record of the pass: its facts and decisions.
        gm: the graph that runs, where weight casts may have become inputs.
    """

    graph: int
    body: str
    rewritten: Rewritten
    gm: fx.GraphModule

    @property
    def key(self) -> str:
        """`0` for a graph, `0/body_0` for a body, as `why(graph=...)` takes it."""
        return f"{self.graph}/{self.body}" if self.body else str(self.graph)

    @property
    def caller(self) -> str:
        """The function that calls a body: "checkpointed", "cond", "while_loop"."""
        return str(self.rewritten.before.meta.get(LOWERED_BODY, ""))

    @property
    def is_compiled(self) -> bool:
        """Whether inductor compiles the graph."""
        return not self.body and EXACT_CASTS in self.gm.meta

    @property
    def exact_casts(self) -> bool | None:
        """Whether inductor's kernels round at each cast; None where that is unknown."""
        found: bool | None = self.gm.meta.get(EXACT_CASTS)
        return found

    @property
    def low(self) -> str:
        return short_name(self.rewritten.low)

    @property
    def device(self) -> Device:
        """The device from whose figures the prices are computed."""
        return self.rewritten.assignment.prices.device

    @cached_property
    def before(self) -> dict[str, fx.Node]:
        """The nodes of the graph before the pass, by name."""
        return {node.name: node for node in self.rewritten.before.graph.nodes}

    @cached_property
    def wide(self) -> dict[str, int]:
        """Each low product that writes fp32 numbers instead of a cast, and its price.

        The price is what was decided by, beyond that of a low result.
        """
        running = {n.name for n in self.gm.graph.nodes if is_wide(n)}
        groups = self.rewritten.assignment.problem.groups
        prices = {g.value: g.made for g in groups if g.made is not None}
        return {name: prices.get(name, 0) for name in running}

    @cached_property
    def ops(self) -> tuple[OpRow, ...]:
        """One row per decision, in graph order."""
        return tuple(_op_rows(self))

    @property
    def categories(self) -> list[tuple[str, int, int]]:
        """Each category with the numbers of its ops in low precision and in fp32."""
        counts = Counter((row.category, row.is_low) for row in self.ops)
        each = [(str(c), counts[c, True], counts[c, False]) for c in Category]
        return [(category, low, high) for category, low, high in each if low or high]

    @cached_property
    def casts(self) -> tuple[CastRow, ...]:
        """One row per cast that clean-up and wide products left, in graph order."""
        return tuple(_cast_rows(self))

    @cached_property
    def costs(self) -> Costs:
        """The cost of the placement, and of other placements."""
        return costs_of(self.rewritten)


def sections_of(
    rewritten: Sequence[Rewritten], graphs: Sequence[fx.GraphModule]
) -> tuple[Section, ...]:
    """Every graph followed by its bodies, in order of capture."""
    return tuple(
        section
        for index, (each, gm) in enumerate(zip(rewritten, graphs, strict=True))
        for section in _with_bodies(Section(index, "", each, gm))
    )


def _with_bodies(section: Section) -> Iterator[Section]:
    yield section
    children = dict(section.rewritten.before.named_children())
    for number, body in enumerate(section.rewritten.bodies):
        named = (name for name, child in children.items() if child is body.gm)
        name = next(named, f"body_{number}")
        path = f"{section.body}/{name}" if section.body else name
        # The running graph may hold another version of the body, with weight copies as
        # inputs.
        gm = getattr(section.gm, name, None)
        if not isinstance(gm, fx.GraphModule):
            gm = body.gm
        yield from _with_bodies(Section(section.graph, path, body, gm))


def portable_row(row: OpRow) -> OpRow:
    """A row that is the same on every machine and in every process."""
    source = portable_place(row.source)
    return replace(row, reason=portable(row.reason), source=source)


def target_name(node: fx.Node) -> str:
    """The name of the op or function that `node` calls."""
    return str(getattr(node.target, "__name__", node.target))


def _op_rows(section: Section) -> Iterator[OpRow]:
    rewritten = section.rewritten
    assignment, verdicts = rewritten.assignment, rewritten.classified.verdicts
    ready = {n.name: n.meta.get(KERNEL) for n in section.gm.graph.nodes}
    for name, decision in assignment.decisions.items():
        node, fact = section.before[name], rewritten.facts.nodes[name]
        reason, heading = _reason(section, decision)
        # Kernels that come in after the casts are known to the running graph alone.
        chain = fact.chain or ready.get(name)
        high, low = assignment.prices.ops[name]
        is_allow = verdicts[name].category is Category.ALLOW
        read = {rewritten.facts.nodes[o.value].storage for o in fact.operands}
        # A view moves no bytes; a write in place shares memory with what it reads, too.
        is_view = fact.storage in read and fact.storage not in rewritten.facts.mutated
        moved = 0 if is_view else fact.read_numel + fact.numel
        yield OpRow(
            graph=section.graph,
            body=section.body,
            name=name,
            op=decision.op or target_name(node),
            category=str(decision.category),
            precision=section.low if decision.low else FP32,
            reason=reason,
            origin=decision.origin,
            module=decision.module,
            source=decision.source,
            listed=decision.listed,
            bytes=moved * HIGH_DTYPE.itemsize,
            heading=heading,
            kernel=chain.kernel if chain else "",
            calls=chain.calls if chain else 1,
            rule=verdicts[name].reason,
            # The reward is no time: it is there to make the solver lower allow ops.
            cost_fp32=high - (assignment.prices.reward if is_allow else 0),
            cost_low=low,
            pinned=assignment.pinned.get(name, ""),
            flops=flops_of(node, fact),
            trains=fact.requires_grad,
            reads=fact.read_numel,
        )


def _reason(section: Section, decision: Decision) -> tuple[str, str]:
    """The reason of a decision, and the heading to group it under."""
    if decision.origin == CEILING:
        return decision.reason, "reads fp32 values, so its result is fp32"
    if not decision.choice:
        return decision.reason, decision.reason
    heading = {
        GAINS_NOTHING: f"{section.low} is predicted to gain nothing",
        COSTS_CASTS: f"casts would cost more than {section.low} saves",
    }.get(decision.choice, decision.choice.partition(" (")[0])
    return f"{decision.reason}; {decision.choice}", heading


def _cast_rows(section: Section) -> Iterator[CastRow]:
    # Two graphs: the record has the casts that clean-up left; only the running graph
    # tells which of them run at each call.
    kept = {n.name: n for n in section.rewritten.gm.graph.nodes}
    running = {n.name: n for n in section.gm.graph.nodes}
    facts = section.rewritten.facts
    for cast in section.rewritten.casts:
        # Clean-up has dropped the cast, or a product writes fp32 numbers in its place.
        if cast.name not in kept or (cast.kind == "up" and cast.value in section.wide):
            continue
        node = running.get(cast.name)
        runs = node is not None and node.op == "call_function"
        meta = node.meta if node is not None else {}
        producer = facts.nodes[facts.maker(cast.value)].op
        if cast.value in facts.constants:
            producer = "weight" if cast.value in facts.weights else "input"
        yield CastRow(
            graph=section.graph,
            body=section.body,
            name=cast.name,
            value=cast.value,
            kind=cast.kind,
            dtype=short_name(cast.dtype),
            bytes=cast.bytes,
            every_call=cast.kind != "weight" or (runs and CAST_KIND in meta),
            producer=producer,
            readers=tuple(user.name for user in kept[cast.name].users),
            source=facts.nodes[facts.maker(cast.value)].source,
            compiled=meta.get(CAST_FATE, ""),
        )


@dataclass(frozen=True)
class Placement:
    """The cost of one placement of a graph.

    Under `do_no_harm=False` the price of an allow op in fp32 includes a *reward* for
    converting the op, larger than all other prices together.  The certificate needs
    costs with rewards, because the solver minimised these costs; a reader wants the
    predicted time.

    Attributes:
        cost: the total that was minimised, rewards included.
        estimate: the total without rewards: the predicted time.
        kept: the bytes that it keeps for the backward, beside copies of weights.
        allow_in_fp32: number of allow ops that the placement leaves in fp32.
        low: the ops that it places low.
    """

    cost: int
    estimate: int
    kept: int
    allow_in_fp32: int
    low: frozenset[str]


@dataclass(frozen=True)
class Costs:
    """The costs of one graph, in units of 0.1 ns.

    Attributes:
        placements: `OURS`, `ALL_FP32` or another policy's name, to its cost.
        optimal_cost: the least cost of any legal placement.
        for_bytes: whether more than that is spent to keep less for the backward.
        reward: the cost added by each allow op left in fp32; 0 with do_no_harm.
        device: the device from whose figures the prices are computed.
    """

    placements: Mapping[str, Placement]
    optimal_cost: int
    for_bytes: bool
    reward: int
    device: str

    @property
    def ours(self) -> Placement:
        return self.placements[OURS]

    @property
    def regret(self) -> dict[str, int]:
        """Policy to its cost above the optimum, rewards included."""
        return {n: self.placements[n].cost - self.optimal_cost for n in POLICIES}

    @property
    def titled(self) -> list[tuple[str, Placement]]:
        """Each placement with its title, in the order in which they are shown."""
        titles = {
            OURS: "this one",
            ALL_FP32: "all fp32",
            "tensorflow": "TensorFlow's passes",
            AUTOCAST: "autocast's type promotion",
            "forced": "allow ops alone",
        }
        return [(title, self.placements[name]) for name, title in titles.items()]


def costs_of(rewritten: Rewritten) -> Costs:
    """The costs of one graph under the prices that its placement used."""
    assignment = rewritten.assignment
    prices, problem = assignment.prices, assignment.problem
    # Others cast what a low product gives.
    groups = [replace(group, made=None) for group in problem.groups]
    of_others = replace(problem, groups=groups)

    # A weight is in memory in any case, and costs nothing where it is read in fp32.
    values = [each for each in prices.kept if each.at_sink]

    def placement(cost: int, low: frozenset[str]) -> Placement:
        left = allow_in_fp32(rewritten, low)
        kept = kept_bytes(values, low)
        return Placement(cost, cost - prices.reward * left, kept, left, low)

    placements = {
        OURS: placement(assignment.cost, assignment.low),
        ALL_FP32: placement(assignment.all_high_cost, frozenset()),
    }
    for name, policy in POLICIES.items():
        # Another tool may lower what our rules deny; only a legal placement has a
        # price.
        low = project(problem, policy(rewritten.classified))
        placements[name] = placement(legal_energy(of_others, low), low)
    return Costs(
        placements=placements,
        optimal_cost=assignment.optimal_cost,
        for_bytes=assignment.solved is not assignment.problem,
        reward=prices.reward,
        device=prices.device.name,
    )


def allow_in_fp32(rewritten: Rewritten, low: frozenset[str]) -> int:
    """The number of allow ops that are not in `low`."""
    classified = rewritten.classified
    return len({*filter(classified.is_allowed, classified.verdicts)} - low)
