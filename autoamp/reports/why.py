"""Explains one node: its rule, its neighbours, and the cost of the other precision."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoamp.errors import OptionError
from autoamp.messages import advice, bytes_text, counted, shorten
from autoamp.passes.decide.assign import legal_energy
from autoamp.passes.decide.ceiling import Root, low_under_autocast, root_of
from autoamp.passes.decide.kept_values import kept_bytes
from autoamp.passes.decide.mincut import (
    Network,
    Problem,
    Solution,
    contradiction,
    solve,
)
from autoamp.passes.decide.problem import held, promised_casts
from autoamp.passes.decide.verdict import CEILING
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.report_rows import FP32, CastRow, OpRow, Section, allow_in_fp32
from autoamp.passes.see.facts import FP32 as READ_IN_FP32
from autoamp.passes.write.layouts import LAST
from autoamp.reports.figures import amount

MEANINGS = {
    "allow": "safe and worth it in low precision",
    "deny": "dangerous in low precision",
    "infer": "may be low where its operands are low",
    "clear": "no arithmetic; follows its neighbours",
}
_SHOWN = 6


def find_section(sections: Sequence[Section], graph: int | str) -> Section:
    """The graph or body called `graph`.

    Raises:
        OptionError: the report has no such graph; the message lists the graphs it has.
    """
    for section in sections:
        if section.key == str(graph):
            return section
    keys = ", ".join(s.key for s in sections) or "none was captured"
    raise OptionError(f"graph={graph!r}: the report has no such graph; it has: {keys}")


def answer(sections: Sequence[Section], name: str, graph: int | str | None) -> str:
    """Why node `name` has its precision, in one graph or body, or in the first with it.

    Args:
        graph: as for `find_section`; None looks in every graph and body, and prefers
            those in which the node is a float op.

    Raises:
        OptionError: there is no such graph, or no such node.
    """
    section = find_section(sections, 0 if graph is None else graph)
    ops = [s for s in sections if any(row.name == name for row in s.ops)]
    holders = ops or [s for s in sections if _has(s, name)]
    others = [s.key for s in holders if s is not section]
    if graph is not None or not holders:
        if others and not _has(section, name):
            there = f"why({name!r}, graph={others[0]!r}) finds it"
            raise OptionError(f"graph {section.key} has no node {name!r}: {there}")
        return explain(section, name)
    if len(holders) == 1:
        return explain(holders[0], name)
    keys = ", ".join(repr(each.key) for each in holders[1:])
    text = explain(holders[0], name)
    return f"{text}\n  namesakes  in the graphs {keys}, found by graph="


def _has(section: Section, name: str) -> bool:
    casts = (cast.name for cast in section.casts)
    return name in section.rewritten.facts.nodes or name in casts


def explain(section: Section, name: str) -> str:
    """Why node `name` has its precision.

    Raises:
        OptionError: the graph has no node of that name; the message lists close ones.
    """
    rows = {row.name: row for row in section.ops}
    if name in rows:
        return "\n".join(_op(section, rows, rows[name]))
    for cast in section.casts:
        if cast.name == name:
            return _cast(section, cast)
    if name not in section.rewritten.facts.nodes:
        raise OptionError(_unknown(section, name, list(rows)))
    maker = element_of(section, name)
    of_maker = f"\n{explain(section, maker)}" if maker else ""
    return f"{name}: {undecided(section, name)}{of_maker}"


def _cast(section: Section, cast: CastRow) -> str:
    output = section.rewritten.gm.graph.output_node().name
    readers = ", ".join(r for r in cast.readers if r != output) or "the output"
    article = "an" if cast.kind == "up" else "a"
    kept = "" if cast.every_call else ", kept until the weight changes"
    return (
        f"{cast.name}: {article} {cast.kind} cast of {cast.value} to {cast.dtype} "
        f"({bytes_text(cast.bytes)}{kept}), read by {readers}.\n"
        f"The precision of the readers is its reason: try why({cast.value!r})."
    )


def undecided(section: Section, name: str) -> str:
    """Why a node without a decision has its precision, as a predicate of the node."""
    facts = section.rewritten.facts
    if name in facts.constants:
        makes_floats = facts.nodes[name].makes_floats
        dtype = "in fp32" if makes_floats else "and holds no fp32 numbers"
        return f"comes from outside the graph {dtype}; it is never changed."
    maker = element_of(section, name)
    if maker:
        verdict = section.rewritten.classified.verdicts.get(maker)
        if verdict is not None and verdict.fp32_results:
            return f"is an element of {maker}, which gives fp32."
        return f"is an element of {maker}, and has the precision of {maker}."
    return "neither reads nor makes fp32 tensors, so it has no precision to choose."


def element_of(section: Section, name: str) -> str:
    """The node that makes the tuple of fp32 tensors that `name` is from, or ""."""
    facts = section.rewritten.facts
    is_float = facts.nodes[name].makes_floats
    return facts.element_of.get(name, "") if is_float else ""


def _op(section: Section, rows: dict[str, OpRow], row: OpRow) -> Iterator[str]:
    yield f"{row.name} ({row.op}) of graph {section.key} runs in {row.precision}"
    yield f"  category   {row.category}: {MEANINGS[row.category]}"
    yield f"  rule       {row.rule} (from {shorten(row.origin)})"
    why = f": {row.choice}" if row.choice else ", because of this rule"
    yield f"  decision   {row.precision}{why}"
    if row.kernel:
        calls = counted(row.calls, "op")
        unfused = advice("fuse", {row.kernel: False}, by_variables=False)
        yield (
            f"  stands for {calls} of the model, as one kernel ({unfused} keeps the "
            "model's ops)"
        )
    if any(n.name == row.name and LAST in n.meta for n in section.gm.graph.nodes):
        yield "  layout     channels last, in which 16-bit convolutions are faster"
    if row.module:
        yield f"  module     {row.module}"
    if row.source:
        yield f"  source     {shorten(row.source)}"
    if row.name in section.wide:
        price = amount(section.wide[row.name], signed=True)
        yield f"  writes     its fp32 sums, which are read as they are: {price}"
    yield from _listed("  reads      ", _operands(section, rows, row.name))
    yield from _listed("  read by    ", _readers(section, rows, row.name))
    yield from _flipped(section, row)


def _operands(section: Section, rows: dict[str, OpRow], name: str) -> list[str]:
    facts = section.rewritten.facts
    operands = []
    for operand, mode in section.rewritten.classified.reads(name):
        maker = facts.producer(operand.value)
        precision = rows[maker].precision if maker in rows else FP32
        wanted = FP32 if mode == "high" else rows[name].precision
        as_it_comes = mode == "any"
        if as_it_comes or precision == wanted:
            operands.append(f"{operand.value} ({precision})")
        elif operand.value in facts.weights:
            operands.append(f"{operand.value} (weight, {wanted} copy)")
        elif operand.value in section.wide:
            operands.append(f"{operand.value} ({precision}, its {wanted} sums)")
        else:
            operands.append(f"{operand.value} ({precision}, cast to {wanted})")
    return operands


def _readers(section: Section, rows: dict[str, OpRow], name: str) -> list[str]:
    facts = section.rewritten.facts
    values = {v for v in facts.nodes if facts.element_of.get(v, v) == name}
    readers = [
        f"{row.name} ({row.precision})"
        for row in rows.values()
        if any(o.value in values for o in facts.nodes[row.name].operands)
    ]
    return readers + [f"the output ({FP32})"] * bool(values & facts.returned)


def _listed(title: str, items: list[str]) -> Iterator[str]:
    if items:
        more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
        yield title + ", ".join(items[:_SHOWN]) + more


def _flipped(section: Section, row: OpRow) -> Iterator[str]:
    other = FP32 if row.is_low else section.low
    change = row.pinned or Flips(section.rewritten).of(row.name)
    if isinstance(change, str):
        verdict = "cannot" if row.is_low else "not under these options"
        yield f"  in {other}    {verdict}: {change}"
        classified = section.rewritten.classified
        if classified.verdicts[row.name].origin == CEILING:
            # The fp32 nodes that type promotion follows to this node begin at a root.
            root = root_of(row.name, classified, low_under_autocast(classified))
            passed = [*_listed("; passed on by ", list(root.path))]
            yield f"  root       {root_text(section, root)}{''.join(passed)}"
        return
    yield f"  in {other}    {_price(section, change)}"
    indent = " " * 13
    appear, vanish = _casts(section, change.appear), _casts(section, change.vanish)
    yield from _listed(f"{indent}casts that would appear: ", appear)
    yield from _listed(f"{indent}casts that would vanish: ", vanish)
    yield from _listed(f"{indent}would change with it: ", list(change.along))


def root_text(section: Section, root: Root) -> str:
    """Why the root of a chain of fp32 nodes is fp32."""
    classified = section.rewritten.classified
    facts = classified.facts
    if root.source not in facts.constants:
        verdict, fact = classified.verdicts[root.source], facts.nodes[root.source]
        reason = "none of its operands is low"
        if verdict.pinned:
            reason = verdict.reason
        elif fact.keeps_state:
            reason = "its results are fp32 in any precision"
        op = f" ({fact.base})" if fact.base else ""
        return f"{root.source}{op} is fp32: {reason}"
    what = "fp32 from outside the graph"
    if root.source in facts.parameters:
        what = "an fp32 parameter"
    elif root.source in facts.weights:
        what = "an fp32 buffer"
    return f"{root.reader} reads {root.source}, {what}"


def _price(section: Section, change: Flip) -> str:
    text = f"{amount(change.extra, signed=True)} predicted time"
    if change.more_kept:
        kept = bytes_text(abs(change.more_kept))
        text += f", {kept} {'more' if change.more_kept > 0 else 'less'} kept"
    low, more = section.low, change.more_in_fp32
    if more > 0:
        text += (
            f", and {counted(more, 'more allow op')} in fp32 "
            f"({advice('do_no_harm', False, by_variables=False)} puts allow ops in "
            f"{low} at any price)"
        )
    elif more < 0:
        text += f", and {counted(-more, 'more allow op')} in {low}"
    return text


def _casts(section: Section, casts: tuple[tuple[str, str], ...]) -> list[str]:
    weights = section.rewritten.facts.weights
    return [
        f"{value} to {FP32 if way == 'up' else section.low}"
        + (" (weight)" if value in weights else "")
        for value, way in casts
    ]


def _unknown(section: Section, name: str, ops: list[str]) -> str:
    names = [*section.rewritten.facts.nodes, *(c.name for c in section.casts)]
    close = difflib.get_close_matches(str(name), names, n=5, cutoff=0.5)
    if close:
        return (
            f"graph {section.key} has no node {name!r}; did you mean "
            f"{', '.join(close)}?"
        )
    some = ", ".join(ops[:_SHOWN])
    return (
        f"graph {section.key} has no node {name!r}; its {len(ops)} float ops are in "
        f"report.ops, the first: {some or 'none'}"
    )


# -- the other precision, and its cost -------------------------------------------------


@dataclass(frozen=True)
class Flip:
    """The best placement in which some nodes are forced into a precision.

    Attributes:
        extra: cost above the placement in force, without rewards.
        more_kept: how many more bytes would be kept for the backward.
        more_in_fp32: how many more allow ops would be in fp32.
        appear, vanish: casts that would be added or removed, as (value, "down" or
            "up"), in graph order.
        along: other nodes that would change precision too, in graph order.
    """

    extra: int
    more_kept: int
    more_in_fp32: int
    appear: tuple[tuple[str, str], ...]
    vanish: tuple[tuple[str, str], ...]
    along: tuple[str, ...]


class Again:
    """Many answers about one problem, each the same as a whole solution would be.

    The total is submodular.  So if variables are held on the source side, the smallest
    least source side only grows; if they are held on the sink side, it only shrinks.
    The part that all answers share is contracted once, and each answer solves the small
    rest.
    """

    def __init__(self, problem: Problem) -> None:
        """Raises ContradictionError: the constraints of `problem` contradict."""
        self._problem = problem
        self._source = solve(problem).source

    def held(self, names: Iterable[str], *, at_source: bool) -> Solution | None:
        """The solution of least cost with variables held on one side; None if illegal.

        Of several, it is the one with the smallest source side.
        """
        network = (self._above if at_source else self._below).copy()
        weights = network.source if at_source else network.sink
        for name in names:
            if name in network.out:  # else the variable stands on that side already
                weights[name] += network.never
        return network.solution(self._problem.unary)

    @cached_property
    def _above(self) -> Network:
        """The network of the variables on the sink side, which may leave it."""
        network = Network(self._problem)
        for name in self._problem.unary:
            if name in self._source:
                network.contract(name, to_source=True)
        return network

    @cached_property
    def _below(self) -> Network:
        """The network of the variables on the source side."""
        network = Network(self._problem)
        for name in self._problem.unary:
            if name not in self._source:
                network.contract(name, to_source=False)
        return network


class Flips:
    """Solves the placement of one graph again; all flips share the solver's set-up."""

    def __init__(self, rewritten: Rewritten) -> None:
        self._rewritten = rewritten
        assignment = rewritten.assignment
        self._again = Again(assignment.solved)
        self._casts = promised_casts(assignment.problem, assignment.low)
        self._left = allow_in_fp32(rewritten, assignment.low)

    def of(self, name: str) -> Flip | str:
        """One node in its other precision, or why the constraints forbid that."""
        return self.of_all((name,), low=name not in self._rewritten.assignment.low)

    def of_all(self, names: Collection[str], *, low: bool) -> Flip | str:
        """All nodes `names` in one precision, or the constraints that forbid it."""
        assignment = self._rewritten.assignment
        problem, prices = assignment.problem, assignment.prices
        solution = self._again.held(names, at_source=low)
        if solution is None:
            return _forbidden(
                self._rewritten, held(problem, names, low=low, why="asked for")
            )
        placed = solution.source
        extra = legal_energy(problem, placed) - assignment.cost
        more_left = allow_in_fp32(self._rewritten, placed) - self._left
        after = promised_casts(problem, placed)
        others = (assignment.low ^ placed).difference(names)
        return Flip(
            extra=extra - prices.reward * more_left,
            more_kept=kept_bytes(prices.kept, placed) - assignment.kept,
            more_in_fp32=more_left,
            appear=tuple(c for c in after if c not in self._casts),
            vanish=tuple(c for c in self._casts if c not in after),
            along=tuple(n for n in assignment.decisions if n in others),
        )


def _forbidden(rewritten: Rewritten, problem: Problem) -> str:
    """One sentence on the law that keeps a node in fp32, and on the node it meets.

    The law of a move is that it rounds no numbers that are read in fp32; every other
    constraint has the two nodes that it holds together in words.
    """
    chain = contradiction(problem).chain
    if not chain:
        return "no placement that the rules allow has all of these ops in low precision"
    (start, _), *steps, (end, reason) = chain
    if not steps:
        return f"{start} stays fp32 ({reason})"
    names = [start, *(name for name, _ in steps)]
    between = [*names[1:3], f"{len(names) - 4} more"] if len(names) > 5 else names[1:-1]
    through = f" through {', '.join(between)}" if between else ""
    verdict = rewritten.classified.verdicts.get(end)
    if verdict is not None and verdict.origin == CEILING:
        reason = f"type promotion leaves {end} fp32"  # its own reason may name `start`
    if not all(map(rewritten.classified.moves, names[:-1])):
        (second, why), *_ = steps
        together = f"{start} is low only together with {second}, because {why}"
        return f"{together}, and {end} stays fp32 ({reason})"
    if end == READ_IN_FP32:
        reader = _reader_in_fp32(rewritten, problem, names[-2])
        return f"{start} would round numbers that {reader} in fp32{through}"
    return f"{start} would round numbers that {end} reads in fp32{through} ({reason})"


def _reader_in_fp32(rewritten: Rewritten, problem: Problem, last: str) -> str:
    """The reader that takes the result of `last` in fp32 in any placement; its verb."""
    classified = rewritten.classified
    keys = {
        group.key[:2]
        for group in problem.groups
        if group.value == last and READ_IN_FP32 in group.readers
    }
    for name in classified.verdicts:
        for operand, mode in classified.reads(name):
            key = operand.value, classified.facts.nodes[name].region
            if key in keys and mode != "same":
                return f"{name} reads"
    return "the graph returns"
