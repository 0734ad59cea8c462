"""The records of the pass as flat rows: one per float op, one per cast.

The text, the page, the JSON and the graph exports of a report read only rows, whose
content is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autoamp.analyse.facts import Facts, NodeFacts
from autoamp.analyse.nodes import KERNEL
from autoamp.analyse.verdict import CEILING
from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.inspect.costs import Costs, costs_of, in_fp32
from autoamp.place.assign import COSTS_CASTS, GAINS_NOTHING, Decision
from autoamp.rewrite.compiled_casts import CAST_FATE, EXACT_CASTS
from autoamp.rewrite.emitted import CAST_KIND
from autoamp.rewrite.rewritten import Rewritten
from autoamp.trace.control_flow import LOWERED_BODY


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

    @cached_property
    def before(self) -> dict[str, fx.Node]:
        """The nodes of the graph before the pass, by name."""
        return {node.name: node for node in self.rewritten.before.graph.nodes}

    @cached_property
    def ops(self) -> tuple[OpRow, ...]:
        """One row per decision, in graph order."""
        return tuple(_op_rows(self))

    @cached_property
    def casts(self) -> tuple[CastRow, ...]:
        """One row per cast that clean-up left in the graph, in graph order."""
        return tuple(_cast_rows(self))

    @cached_property
    def costs(self) -> Costs:
        """The cost of the placement, and of other placements."""
        return costs_of(self.rewritten)


@dataclass(frozen=True)
class OpRow:
    """One float op: its precision and why.

    Attributes:
        graph, body: the section of the op; `body` is "" outside bodies.
        name: the name of the op's node, the same before and after rewriting.
        op: the full op name, such as "aten::linear.default".
        category: allow, deny, infer or clear.
        precision: "fp32" or the low dtype's short name.
        reason: a sentence; never empty.
        origin: the rules file, user list or part of the pass behind the reason.
        module: path of the module that calls the op, "" at the top.
        source: "file:line: code" of the user's line, "" where unknown.
        listed: whether any rule knows the op.
        bytes: fp32 bytes that the op reads and writes; 0 for a view.
        heading: the reason without the details of this op; ops are grouped by it.
        kernel: the name of the kernel, where the op stands for a chain of the model's
            calls (`unfused=` takes its name), else "".
        calls: the number of the model's calls that the op stands for.
        rule: the part of the reason that comes from the rule for the op's category.
        cost_fp32, cost_low: the op's price in either precision, without casts, in the
            unit of its section: 0.1 ns or bytes.
    """

    graph: int
    body: str
    name: str
    op: str
    category: str
    precision: str
    reason: str
    origin: str
    module: str
    source: str
    listed: bool
    bytes: int
    heading: str
    kernel: str = ""
    calls: int = 1
    rule: str = ""
    cost_fp32: int = 0
    cost_low: int = 0

    @property
    def is_low(self) -> bool:
        return self.precision != short_name(HIGH_DTYPE)

    @property
    def choice(self) -> str:
        """The part of the reason that comes from the placement, or ""."""
        return self.reason.removeprefix(self.rule).removeprefix("; ")


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
    every_call: bool
    producer: str
    readers: tuple[str, ...]
    source: str
    compiled: str = ""


def sections_of(
    rewritten: Sequence[Rewritten], graphs: Sequence[fx.GraphModule]
) -> tuple[Section, ...]:
    """Every graph followed by its bodies, in order of capture."""
    return tuple(
        section
        for index, (each, gm) in enumerate(zip(rewritten, graphs, strict=True))
        for section in _with_bodies(Section(index, "", each, gm))
    )


def _op_rows(section: Section) -> Iterator[OpRow]:
    rewritten = section.rewritten
    ready = {n.name: n.meta.get(KERNEL) for n in section.gm.graph.nodes}
    for name, decision in rewritten.assignment.decisions.items():
        reason, heading = _reason(section, decision)
        fact = rewritten.facts.nodes[name]
        chain = fact.chain or ready.get(name)
        yield OpRow(
            graph=section.graph,
            body=section.body,
            name=name,
            op=decision.op or target_name(section.before[name]),
            category=str(decision.category),
            precision=section.low if decision.low else short_name(HIGH_DTYPE),
            reason=reason,
            origin=decision.origin,
            module=decision.module,
            source=decision.source,
            listed=decision.listed,
            bytes=_bytes_moved(rewritten, fact),
            heading=heading,
            kernel=chain.kernel if chain else "",
            calls=chain.calls if chain else 1,
            rule=rewritten.classified.verdicts[name].reason,
            cost_fp32=in_fp32(rewritten, name),
            cost_low=rewritten.assignment.prices.ops[name][1],
        )


def _cast_rows(section: Section) -> Iterator[CastRow]:
    kept = {n.name: n for n in section.rewritten.gm.graph.nodes}
    facts = section.rewritten.facts
    in_place = {
        n.name
        for n in section.gm.graph.nodes
        if n.op == "call_function" and CAST_KIND in n.meta
    }
    fates = {n.name: n.meta.get(CAST_FATE, "") for n in section.gm.graph.nodes}
    for cast in section.rewritten.casts:
        if cast.name in kept:
            yield CastRow(
                graph=section.graph,
                body=section.body,
                name=cast.name,
                value=cast.value,
                kind=cast.kind,
                dtype=short_name(cast.dtype),
                bytes=cast.bytes,
                every_call=cast.kind != "weight" or cast.name in in_place,
                producer=_producer(facts, cast.value),
                readers=tuple(user.name for user in kept[cast.name].users),
                source=facts.nodes[facts.maker(cast.value)].source,
                compiled=fates.get(cast.name, ""),
            )


def target_name(node: fx.Node) -> str:
    """The name of the op or function that `node` calls."""
    return str(getattr(node.target, "__name__", node.target))


def _producer(facts: Facts, value: str) -> str:
    """The op that made a value, or where the value comes from."""
    if value in facts.constants:
        return "weight" if value in facts.weights else "input"
    return facts.nodes[facts.maker(value)].op


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


def _bytes_moved(rewritten: Rewritten, fact: NodeFacts) -> int:
    storages = {rewritten.facts.nodes[o.value].storage for o in fact.operands}
    if fact.storage in storages and fact.storage not in rewritten.facts.mutated:
        return 0  # a view
    return (fact.read_numel + fact.numel) * HIGH_DTYPE.itemsize
