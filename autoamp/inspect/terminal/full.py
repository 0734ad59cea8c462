"""The full report: rich renderables, laid out for 100 columns.

Nothing here prints.  Text from users (source lines, names) is never read as markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from autoamp import compat
from autoamp.inspect.costs import OURS, Costs, amount, bytes_text, titles
from autoamp.inspect.document import Document
from autoamp.inspect.guarded import lines
from autoamp.inspect.rows import OpRow, Section
from autoamp.inspect.sections.cast_counts import counts_text
from autoamp.inspect.sections.compiled_casts import (
    compiled_casts,
    compiled_text,
)
from autoamp.inspect.terminal.fp32 import stayed_fp32
from autoamp.inspect.terminal.parts import plain_table
from autoamp.inspect.text import counted, kernels_text, op_title, shorten
from autoamp.messages import advice

_LISTED = 8
_REWARD = (
    "allow ops run in low precision wherever they may, at any cost; among such "
    "placements the predicted time is the least.  Costs include a reward for each "
    "converted allow op, predicted times do not."
)
_MEANINGS = {
    "allow": "safe and worth it",
    "deny": "dangerous",
    "infer": "as low as its operands",
    "clear": "no arithmetic",
}


def render(document: Document) -> Iterator[RenderableType]:
    """The whole report, top to bottom."""
    skipped = document.skipped
    if document.sections:
        yield from lines("the summary", lambda: [_head(document)])
    else:
        said = "not converted, runs in fp32" if skipped else "no graph captured yet"
        hint = "" if skipped else ": call the model once, then ask again"
        title = f"autoamp report: {document.label}"
        yield Text.assemble((title, "bold"), f"\n{said}{hint}")
    for section in document.sections:
        block = Group(*lines(f"graph {section.key}", partial(_section, section)))
        yield Padding(block, (1, 0, 0, 4 if section.body else 0))
    yield from _skipped(skipped)
    yield from lines("the note on costs", lambda: _note(document))


def _note(document: Document) -> Iterator[RenderableType]:
    if any(costs.reward for costs in document.costs):
        forced = advice("do_no_harm", False, by_variables=False)
        yield Text(f"\nNote on {forced}: {_REWARD}")


def _head(document: Document) -> Text:
    ops, runs, low = document.ops, document.runs, document.compute_dtype
    assert low is not None
    low_ops = sum(row.is_low for row in ops)
    graphs = counted(sum(not s.body for s in document.sections), "graph")
    lines = [
        f"{low_ops:,} of {counted(len(ops), 'float op')} in {low}, the rest in fp32.",
        counts_text(document.cast_counts, low),
        *compiled_text(document.compiled_casts),
        *kernels_text(ops),
        f"{graphs} captured; rewritten graphs ran {counted(runs, 'time')}.",
    ]
    if runs == 0:
        lines.append("No rewritten graph has run yet.")
    return Text.assemble(
        (f"autoamp report: {document.label}, compute dtype {low}", "bold"),
        "".join(f"\n{line}" for line in lines),
    )


def _section(section: Section) -> Iterator[RenderableType]:
    name, ops = f"graph {section.key}", section.ops
    if section.body:
        name = f"body of graph {section.graph}: {section.body} ({section.caller})"
    low, nodes = sum(row.is_low for row in ops), len(section.before)
    title = f"{name}: {low} of {counted(len(ops), 'float op')} in {section.low}"
    yield Rule(Text(f"{title}, {counted(nodes, 'node')}", "bold"), align="left")
    if not ops:
        yield Text("The graph has no float ops: there is nothing to decide.")
        return
    side_by_side = Table.grid(padding=(0, 4))
    side_by_side.add_row(_categories(section), _casts(section))
    yield side_by_side
    yield from _unrounded(section)
    yield from stayed_fp32(ops, section.low)
    yield from _unlisted(ops)
    yield from _costs(section.costs)
    yield _seconds(section, nodes)


def _categories(section: Section) -> Table:
    table = plain_table("category", "")
    table.add_column(section.low, justify="right")
    table.add_column("fp32", justify="right")
    counts = Counter((row.category, row.is_low) for row in section.ops)
    for category, meaning in _MEANINGS.items():
        low, high = counts[category, True], counts[category, False]
        if low or high:
            table.add_row(category, Text(meaning, "dim"), str(low), str(high))
    return table


def _casts(section: Section) -> Table:
    table = plain_table("casts")
    table.add_column("count", justify="right")
    table.add_column("bytes", justify="right")
    names = {
        ("weight", False): f"weights, kept in {section.low}",
        ("weight", True): f"weights to {section.low}",
        ("down", True): f"down, to {section.low}",
        ("up", True): "up, to fp32",
    }
    for key, name in names.items():
        chosen = [c.bytes for c in section.casts if (c.kind, c.every_call) == key]
        if chosen:
            table.add_row(name, str(len(chosen)), bytes_text(sum(chosen)))
    if not section.casts:
        table.add_row("none", "0", "0 B")
    return table


def _unrounded(section: Section) -> Iterator[RenderableType]:
    """The casts down whose value goes on unrounded inside a kernel of inductor."""
    found = compiled_casts([section])
    if found is None or not found.unrounded:
        return
    yield Text("\nCasts inside kernels of inductor, where no value is rounded", "bold")
    for cast in found.unrounded[:_LISTED]:
        where = f" at {shorten(cast.source)}" if cast.source else ""
        kept = ", and written to memory" if cast.compiled == compat.PARTLY else ""
        yield _indented(f"{cast.name}: {op_title(cast.producer)}{where}{kept}")
    if len(found.unrounded) > _LISTED:
        yield _indented(f"... and {len(found.unrounded) - _LISTED} more")


def _unlisted(ops: Sequence[OpRow]) -> Iterator[RenderableType]:
    counts = Counter(
        (row.op, row.category, row.reason) for row in ops if not row.listed
    )
    if not counts:
        return
    yield Text("\nOps in no list (allow, deny, infer and clear add them)", "bold")
    for (op, category, reason), count in counts.most_common(_LISTED):
        times = f" x{count}" if count > 1 else ""
        yield _indented(f"{op_title(op)}{times} → {category}: {reason}")
    if len(counts) > _LISTED:
        yield _indented(f"... and {len(counts) - _LISTED} more")


def _costs(costs: Costs) -> Iterator[RenderableType]:
    kind = "bytes kept for the backward" if costs.in_bytes else "time"
    if len({(p.cost, p.estimate) for p in costs.placements.values()}) == 1:
        yield Text.assemble(
            (f"\nPredicted {kind}", "bold"),
            f": {amount(costs.ours.estimate, costs.in_bytes)} under every policy.",
        )
        yield _indented(_certificate(costs))
        return
    yield Text.assemble(
        (f"\nPredicted {kind}", "bold"),
        f" of ops and casts, forward and backward (prices: {costs.device})",
    )
    table = plain_table("placement")
    table.add_column("predicted", justify="right")
    table.add_column("against this", justify="right")
    if costs.reward:
        table.add_column("allow ops left in fp32", justify="right")
    for name, title in titles(costs).items():
        placement = costs.placements[name]
        extra = placement.estimate - costs.ours.estimate
        cells = [
            title,
            amount(placement.estimate, costs.in_bytes),
            "" if name == OURS else amount(extra, costs.in_bytes, signed=True),
        ]
        table.add_row(*cells, *[str(placement.allow_in_fp32)] * bool(costs.reward))
    yield Padding(table, (0, 0, 0, 2))
    yield _indented(_certificate(costs))


def _certificate(costs: Costs) -> str:
    cost, unit = costs.ours.cost, "bytes" if costs.in_bytes else "units of 0.1 ns"
    best = (
        "the least of all legal placements (min-cut)"
        if cost == costs.optimal_cost
        else f"{cost - costs.optimal_cost:,} above the least of all legal placements"
    )
    return (
        f"Certificate: cost {cost:,} ({unit}) is {best}, and an independent recount "
        "over the emitted graph gave the same."
    )


def _seconds(section: Section, nodes: int) -> Text:
    seconds = section.rewritten.seconds
    total = sum(seconds.values())
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {1e3 * took:.0f}" for name, took in longest)
    return Text.assemble(
        ("\nThe pass", "bold"),
        f" took {1e3 * total:.0f} ms, {1e3 * total / max(nodes, 1):.2f} ms per node "
        f"(longest: {parts}).",
    )


def _skipped(skipped: Sequence[tuple[str, str]]) -> Iterator[RenderableType]:
    if not skipped:
        return
    heading = Rule(Text("not converted, and why", "bold"), align="left")
    yield Padding(heading, (1, 0, 0, 0))
    for what, why in skipped:
        yield Text.assemble((shorten(what), "bold"), f": {why}")


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2))
