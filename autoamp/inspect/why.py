"""Explains one node: its rule, its neighbours, and the cost of a change."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from autoamp.analyse.ceiling import Root, promotes_to_low, root_of
from autoamp.analyse.verdict import CEILING, Verdict
from autoamp.errors import OptionError, PlacementError
from autoamp.inspect.changes import (
    Flip,
    Remedy,
    candidates,
    contradiction,
    flip,
    remedy_for,
)
from autoamp.inspect.rows import Section
from autoamp.inspect.text import amount, bytes_text, counted, shorten
from autoamp.messages import advice
from autoamp.rewrite.layouts import LAST
from autoamp.rules import Category
from autoamp.saved.rows import FP32, CastRow, OpRow

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
    known = ", ".join(s.key for s in sections) or "none was captured"
    raise OptionError(f"graph={graph!r}: the report has no such graph; it has: {known}")


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
    told = f"\n{explain(section, maker)}" if maker else ""
    return f"{name}: {undecided(section, name)}{told}"


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
    why = f": {row.choice}" if row.choice else ", by that rule"
    yield f"  decision   {row.precision}{why}"
    if row.kernel:
        calls = counted(row.calls, "op")
        left = advice("unfused", [row.kernel], by_variables=False)
        yield (
            f"  stands for {calls} of the model, as one kernel ({left} keeps the "
            "model's ops)"
        )
    if any(n.name == row.name and LAST in n.meta for n in section.gm.graph.nodes):
        yield "  layout     channels last, in which 16-bit convolutions are faster"
    if row.module:
        yield f"  module     {row.module}"
    if row.source:
        yield f"  source     {shorten(row.source)}"
    yield from _listed("  reads      ", _operands(section, rows, row.name))
    yield from _listed("  read by    ", _readers(section, rows, row.name))
    yield from _flipped(section, row)


def _operands(section: Section, rows: dict[str, OpRow], name: str) -> list[str]:
    facts = section.rewritten.facts
    said = []
    for operand, mode in section.rewritten.classified.reads(name):
        maker = facts.producer(operand.value)
        held = rows[maker].precision if maker in rows else FP32
        wanted = FP32 if mode == "high" else rows[name].precision
        as_it_comes = mode == "any"
        if as_it_comes or held == wanted:
            said.append(f"{operand.value} ({held})")
        elif operand.value in facts.weights:
            said.append(f"{operand.value} (weight, {wanted} copy)")
        else:
            said.append(f"{operand.value} ({held}, cast to {wanted})")
    return said


def _readers(section: Section, rows: dict[str, OpRow], name: str) -> list[str]:
    facts = section.rewritten.facts
    values = {v for v in facts.nodes if facts.element_of.get(v, v) == name}
    said = [
        f"{row.name} ({row.precision})"
        for row in rows.values()
        if any(o.value in values for o in facts.nodes[row.name].operands)
    ]
    return said + [f"the output ({FP32})"] * bool(values & facts.returned)


def _listed(title: str, items: list[str]) -> Iterator[str]:
    if items:
        more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
        yield title + ", ".join(items[:_SHOWN]) + more


def _flipped(section: Section, row: OpRow) -> Iterator[str]:
    other = FP32 if row.is_low else section.low
    problem, change = row.pinned, None
    if not problem:
        try:
            change = flip(section.rewritten, row.name)
        except PlacementError as error:
            problem = contradiction(error)
    if change is None:
        if row.is_low:
            yield f"  in {other}    cannot: {problem}"
        else:
            yield from _cannot(section, row, problem)
        return
    yield f"  in {other}    {_price(section, change)}"
    if not row.is_low:
        remedy = remedy_for(section.rewritten, row.name)
        if remedy is not None:
            yield f"             by {remedy.words}: {_predicted(section, remedy)}"
    indent = " " * 13
    appear, vanish = _casts(section, change.appear), _casts(section, change.vanish)
    yield from _listed(f"{indent}casts that would appear: ", appear)
    yield from _listed(f"{indent}casts that would vanish: ", vanish)
    yield from _listed(f"{indent}would change with it: ", list(change.along))


def _cannot(section: Section, row: OpRow, why: str) -> Iterator[str]:
    """The options that would make an fp32 node low, or why none would; and the root."""
    rewritten = section.rewritten
    verdict = rewritten.classified.verdicts[row.name]
    remedy = remedy_for(rewritten, row.name)
    if remedy is None:
        yield f"  in {section.low}    cannot: {why}"
        if rewritten.options is not None:
            tried = [" and ".join(w) for _, w in candidates(rewritten, row.name)]
            yield from _listed("             tried in vain: ", tried)
    else:
        said = f"by {remedy.words}: {_predicted(section, remedy)}"
        risk = risk_of(verdict)
        said += f"; {risk}" if risk else ""
        yield f"  in {section.low}    {said}"
        yield f"             otherwise not: {why}"
        yield from _listed("             would change with it: ", list(remedy.along))
    if verdict.origin == CEILING:
        classified = rewritten.classified
        root = root_of(row.name, classified, promotes_to_low(classified))
        passed = [*_listed("; passed on by ", list(root.path))]
        yield f"  root       {root_text(section, root)}{''.join(passed)}"


def _predicted(section: Section, remedy: Remedy) -> str:
    in_bytes = section.rewritten.assignment.prices.in_bytes
    kind = "bytes kept" if in_bytes else "predicted time"
    return f"{amount(remedy.extra, in_bytes, signed=True)} {kind}"


def risk_of(verdict: Verdict) -> str:
    """The risk of an option that makes a node low, or ""."""
    if verdict.origin == CEILING:
        return "it rounds values that torch.autocast keeps in fp32"
    if verdict.category is Category.DENY and not verdict.origin.endswith("="):
        return "its rule says what is at risk"
    return ""


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
    in_bytes, low = section.rewritten.assignment.prices.in_bytes, section.low
    kind = "bytes kept" if in_bytes else "predicted time"
    text = f"{amount(change.extra_estimate, in_bytes, signed=True)} {kind}"
    more = change.extra_allow_in_fp32
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
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
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
