"""The text of a report: the summary that fits a screen, and the whole report.

Nothing here prints.  Text from users (source lines, names) is never read as markup.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from rich.console import Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from autoamp import compat
from autoamp.messages import (
    advice,
    bytes_text,
    counted,
    lines,
    not_captured,
    one_name,
    op_title,
    plain_table,
    seconds_text,
    shorten,
)
from autoamp.passes.report_rows import CastRow, Costs, OpRow, Section
from autoamp.reports.casts import compiled_text, counts_text, unrounded
from autoamp.reports.figures import (
    Coverage,
    Document,
    LossScaleReport,
    Stayed,
    WeightRow,
    amount,
)
from autoamp.reports.findings import (
    FOOTNOTE,
    NOTHING_YET,
    WAYS,
    because_of,
    gains_of,
    kernels_text,
    memory_text,
    runs_low,
    update_text,
)
from autoamp.training.scale import NoLossScale

LISTED = 3
"""Entries of each list of the summary; the rest are counted."""

_MOST = 8
"""Entries of each list of the whole report."""


def _heading(text: str, rest: str = "") -> Text:
    return Text.assemble((text, "bold"), rest)


def _line(text: str, indent: int = 2, style: str = "") -> Padding:
    return Padding(Text(text, style), (0, 0, 0, indent))


# -- the summary: four questions and their answers -------------------------------------


def summary_of(
    report: Document, advice: Callable[[], Sequence[str]]
) -> Iterator[RenderableType]:
    """The summary; `advice` gives the sentences on what to do next."""
    title = f"autoamp report: {report.label}"
    if report.explained_for:
        title += f", explained for {report.explained_for}"
    low = report.compute_dtype
    if low is None:
        yield _heading(title)
        if not report.skipped:
            yield Text(NOTHING_YET)
            return
        yield from _not_converted(report)
    else:
        yield _heading(f"{title}, compute dtype {low}")
        yield from lines(
            "the answer to what runs low",
            lambda: _answer(
                "What runs low", [*runs_low(report, low), *_so_far(report)]
            ),
        )
        yield from lines("the gain", lambda: _gains(report, low))
        yield from lines("the list of what stayed in fp32", lambda: _stayed(report))
    yield from lines("the advice", lambda: _answer("What to do next", advice()))


def _answer(question: str, said: Iterable[str]) -> Iterator[Text | Padding]:
    yield _heading(question)
    yield from map(_line, said)


def _gains(report: Document, low: str) -> Iterator[RenderableType]:
    title, rows, sentence = gains_of(report.headline, low)
    yield _heading(title)
    if rows:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for column in ("", *WAYS):
            justify: JustifyMethod = "right" if column else "left"
            # A name continues on the next line; figures are whole.
            table.add_column(column, justify=justify, no_wrap=bool(column))
        for row in rows:
            table.add_row(*row)
        yield Padding(table, (0, 0, 0, 2))
    yield _line(sentence)
    if memory := memory_text(report):
        yield _line(memory)
    if rows:
        yield _line(FOOTNOTE)


def _stayed(report: Document) -> Iterator[RenderableType]:
    """The ops that stayed in fp32, by reason, the costliest first."""
    groups, left = report.stayed, not_captured(report.skipped)
    count = sum(group.count for group in groups)
    if not count and not left:
        yield from _answer("What stayed in fp32, and why", ["Nothing."])
        return
    size, total = "", report.headline.seconds
    if total is not None and count:
        spent = sum(group.seconds or 0 for group in groups)
        size = f", {seconds_text(spent)} of the {seconds_text(total)}"
    yield _heading(f"What stayed in fp32, and why ({counted(count, 'op')}{size})")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", min_width=7, no_wrap=True)
    table.add_column(overflow="fold")
    for group in groups[:LISTED]:
        ops = ", ".join(group.ops[:2]) + (", ..." if len(group.ops) > 2 else "")
        reason = Text(f"{ops} ({group.count:,}): {group.reason}")
        table.add_row(cost_text(group), reason)
    if groups:
        yield Padding(table, (0, 0, 0, 2))
    more = len(groups) - LISTED
    if more > 0:
        yield _line(f"and {counted(more, 'more reason')}: report.full()")
    if left:
        what, why = left[0]
        yield _line(f"{_were(len(left), 'part')} not captured: {shorten(what)}: {why}")


def cost_text(group: Stayed) -> str:
    """The predicted time of a group of ops; without a prediction, its bytes."""
    if group.seconds is None:
        return bytes_text(group.bytes)
    return seconds_text(group.seconds)


def _not_converted(report: Document) -> Iterator[RenderableType]:
    """The first three answers for a model that is not converted."""
    nothing = "Nothing: the model is not converted and runs unchanged."
    if report.coverage is not None and report.coverage.calls:
        nothing = "Nothing runs in graphs of the pass; the reasons say how calls ran."
    yield from _answer("What runs low", [nothing, *_so_far(report)])
    yield from _answer("What it should gain here", ["Nothing."])
    shown, more = report.skipped[:LISTED], len(report.skipped) - LISTED
    reasons = [f"{shorten(what)}: {reason.rstrip('.')}." for what, reason in shown]
    reasons += [f"and {more:,} more: report.full()"] if more > 0 else []
    yield from _answer("What was not converted, and why", reasons)


# -- calls and steps so far ------------------------------------------------------------


def _so_far(report: Document) -> Iterator[str]:
    """Sentences on what has happened in calls and steps so far."""
    if report.explained_for:
        return
    if report.coverage is not None and report.coverage.calls:
        yield _covered(report.coverage)
    if report.loss_scale is not None:
        yield _loss_scaling(report.loss_scale)
    yield from map(update_text, report.updates)


def _were(count: int, noun: str) -> str:
    return f"{counted(count, noun)} {'was' if count == 1 else 'were'}"


def _covered(shares: Coverage) -> str:
    """How many calls ran rewritten graphs, and how many flops ran in low precision."""
    ran = shares.calls - shares.calls_aside
    text = f"{ran:,} of {counted(shares.calls, 'call')} ran rewritten graphs"
    if shares.calls_in_part:
        text += f", {shares.calls_in_part:,} of them graphs that stayed fp32 as well"
    if shares.share_of_flops is not None:
        flops, left = "their flops", ""
        if shares.parts_not_captured:
            parts = _were(shares.parts_not_captured, "part")
            flops, left = "the flops in them", f" ({parts} not captured)"
        text += f"; {shares.share_of_flops:.1%} of {flops} ran in low precision{left}"
    return f"{text}."


def _loss_scaling(state: LossScaleReport) -> str:
    """The loss scale, and the number of skipped steps."""
    if state.foreign:
        return "Loss scaling is left to the GradScaler that steps the optimizer."
    skipped = f"{_were(state.skipped_steps, 'step')} skipped"
    if state.kind == NoLossScale.__name__:
        return f"There is no loss scale; {skipped} for gradients that are not finite."
    since = counted(state.growth_tracker, "step")
    scale = f"The loss scale is {state.scale:,g} ({state.kind})"
    return f"{scale}, unchanged for {since}; {skipped}."


def _calls(report: Document) -> Iterator[RenderableType]:
    """The end of the whole report: copied weights, calls, the last skipped steps."""
    if report.explained_for:
        return
    if report.unwatched:
        weights = counted(report.unwatched, "weight")
        yield Text(
            f"\nEach call copies {weights} to the low dtype again, because other code "
            "may\nhold their memory (a NumPy array, a file, a state_dict, another "
            "tensor), or\nwrites to it between steps.  If no other code needs the "
            "memory:\np.data = p.data.clone()"
        )
    yield from (Text(f"\n{line}") for line in _so_far(report))
    state = report.loss_scale
    if state is not None and not state.foreign:
        yield from (Text(f"  {why}") for why in state.skips[-_MOST:])


# -- the whole report ------------------------------------------------------------------

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


def full_of(report: Document) -> Iterator[RenderableType]:
    """The whole report, top to bottom."""
    skipped = report.skipped
    if report.sections:
        yield from lines("the summary", lambda: [_head(report)])
    else:
        state = "not converted, runs in fp32" if skipped else NOTHING_YET
        yield _heading(f"autoamp report: {report.label}", f"\n{state}")
    for section in report.sections:
        block = Group(*lines(f"graph {section.key}", partial(_section, section)))
        yield Padding(block, (1, 0, 0, 4 if section.body else 0))
    if skipped:
        yield Padding(
            Rule(_heading("not converted, and why"), align="left"), (1, 0, 0, 0)
        )
        yield from (_heading(shorten(what), f": {why}") for what, why in skipped)
    yield from lines("the note on costs", lambda: _note(report.costs))
    yield from lines("the prediction", lambda: _prediction(report))
    yield from lines("the list of casts", lambda: _largest_casts(report.casts))
    yield from lines("the list of weights", lambda: _weights(report.weights))
    yield from _calls(report)


def _note(costs: Sequence[Costs]) -> Iterator[RenderableType]:
    if any(cost.reward for cost in costs):
        forced = advice("do_no_harm", False, by_variables=False)
        yield Text(f"\nNote on {forced}: {_REWARD}")


def _head(report: Document) -> Text:
    ops, runs, low = report.ops, report.runs, report.sections[0].low
    low_ops = sum(row.is_low for row in ops)
    graphs = counted(sum(not s.body for s in report.sections), "graph")
    sentences = [
        f"{low_ops:,} of {counted(len(ops), 'float op')} in {low}, the rest in fp32.",
        counts_text(report.cast_counts, low),
        *compiled_text(report.sections),
        *kernels_text(ops),
        f"{graphs} captured; rewritten graphs ran {counted(runs, 'time')}.",
    ]
    if runs == 0:
        sentences.append("No rewritten graph has run yet.")
    title = f"autoamp report: {report.label}, compute dtype {low}"
    return _heading(title, "".join(f"\n{line}" for line in sentences))


def _section(section: Section) -> Iterator[RenderableType]:
    name, ops = f"graph {section.key}", section.ops
    if section.body:
        name = f"body of graph {section.graph}: {section.body} ({section.caller})"
    low, nodes = sum(row.is_low for row in ops), len(section.before)
    title = f"{name}: {low} of {counted(len(ops), 'float op')} in {section.low}"
    yield Rule(_heading(f"{title}, {counted(nodes, 'node')}"), align="left")
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
    seconds = section.rewritten.seconds
    total = sum(seconds.values())
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {1e3 * took:.0f}" for name, took in longest)
    yield _heading(
        "\nThe pass",
        f" took {1e3 * total:.0f} ms, {1e3 * total / max(nodes, 1):.2f} ms per node "
        f"(longest: {parts}).",
    )


def _categories(section: Section) -> Table:
    table = plain_table("category", "", numbers=(section.low, "fp32"))
    for category, low, high in section.categories:
        table.add_row(category, Text(_MEANINGS[category], "dim"), str(low), str(high))
    return table


def _casts(section: Section) -> Table:
    table = plain_table("casts", numbers=("count", "bytes"))
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
    casts = unrounded([section])
    if not casts:
        return
    yield _heading("\nCasts inside kernels of inductor, where no value is rounded")
    for cast in casts[:_MOST]:
        where = f" at {shorten(cast.source)}" if cast.source else ""
        kept = ", and written to memory" if cast.compiled == compat.PARTLY else ""
        yield _line(f"{cast.name}: {op_title(cast.producer)}{where}{kept}")
    if len(casts) > _MOST:
        yield _line(f"... and {len(casts) - _MOST} more")


def _unlisted(ops: Sequence[OpRow]) -> Iterator[RenderableType]:
    counts = Counter(
        (row.op, row.category, row.reason) for row in ops if not row.listed
    )
    if not counts:
        return
    yield _heading("\nOps in no list (allow, deny, infer and clear add them)")
    for (op, category, reason), count in counts.most_common(_MOST):
        times = f" x{count}" if count > 1 else ""
        yield _line(f"{op_title(op)}{times} → {category}: {reason}")
    if len(counts) > _MOST:
        yield _line(f"... and {len(counts) - _MOST} more")


def _costs(costs: Costs) -> Iterator[RenderableType]:
    title, placements = "\nPredicted time", costs.placements
    if len({(p.cost, p.estimate, p.kept) for p in placements.values()}) == 1:
        same = amount(costs.ours.estimate)
        yield _heading(title, f": {same} under every policy.")
        yield _line(_certificate(costs))
        return
    prices = f" of ops and casts, forward and backward (prices: {costs.device})"
    yield _heading(title, prices)
    table = plain_table("placement")
    trains = any(each.kept for each in placements.values())
    columns = ["predicted", "against this"]
    columns += ["kept for the backward"] * trains
    columns += ["allow ops left in fp32"] * bool(costs.reward)
    for column in columns:
        table.add_column(column, justify="right")
    for title, each in costs.titled:
        extra = amount(each.estimate - costs.ours.estimate, signed=True)
        cells = [title, amount(each.estimate), "" if each is costs.ours else extra]
        cells += [bytes_text(each.kept)] * trains
        table.add_row(*cells, *[str(each.allow_in_fp32)] * bool(costs.reward))
    yield Padding(table, (0, 0, 0, 2))
    yield _line(_certificate(costs))


def _certificate(costs: Costs) -> str:
    cost = costs.ours.cost
    best = "the least of all legal placements (min-cut)"
    if cost != costs.optimal_cost:
        above = cost - costs.optimal_cost
        best = f"{above:,} above the least of all legal placements"
        best += ", so that less is kept for the backward" * costs.for_bytes
    return (
        f"Certificate: cost {cost:,} (units of 0.1 ns) is {best}; an independent "
        "recount over the emitted graph gave the same."
    )


# -- the ops that stayed in fp32, with their places ------------------------------------

MOST_REASONS = 10
MOST_PLACES = 3


def stayed_fp32(ops: Sequence[OpRow], low: str) -> Iterator[RenderableType]:
    """Yields a heading, then each reason and its ops with module and source line.

    Reasons of allow ops come first, then those whose ops move most bytes.
    """
    high = [row for row in ops if not row.is_low]
    if not high:
        yield _heading(f"\nNothing stayed in fp32: every float op runs in {low}.")
        return
    yield _heading(f"\nWhat stayed in fp32, and why ({counted(len(high), 'op')})")
    groups: dict[tuple[bool, str], list[OpRow]] = defaultdict(list)
    for row in sorted(high, key=lambda row: -row.bytes):
        groups[row.category != "allow", row.heading].append(row)

    def importance(key: tuple[bool, str]) -> tuple[bool, int]:
        return key[0], -sum(row.bytes for row in groups[key])

    # Reasons that are equally important stand in graph order.
    graph_order = dict.fromkeys((row.category != "allow", row.heading) for row in high)
    keys = sorted(graph_order, key=importance)
    for key in keys[:MOST_REASONS]:
        rows = groups[key]
        yield _line(f"• {key[1]} ({counted(len(rows), 'op')})")
        yield from _places(rows)
    if len(keys) > MOST_REASONS:
        rest = keys[MOST_REASONS:]
        ops_left = counted(sum(len(groups[key]) for key in rest), "op")
        more = counted(len(rest), "more reason")
        yield _line(f"... and {more} for {ops_left}; all are in report.ops")


def _places(rows: Sequence[OpRow]) -> Iterator[RenderableType]:
    """Each op with its source line; repeats of a layer are one place."""
    same: dict[tuple[str, str, str], list[OpRow]] = defaultdict(list)
    for row in rows:
        same[row.op, row.category, row.source].append(row)
    for (op, category, source), repeats in list(same.items())[:MOST_PLACES]:
        times = f" x{len(repeats)}" if len(repeats) > 1 else ""
        module = one_name([row.module for row in repeats])
        moved = sum(row.bytes for row in repeats)
        size = f", {bytes_text(moved)}" if moved else ", a view"
        where = f" in {module}" if module else ""
        yield _line(f"{category} {op_title(op)}{times}{size}{where}", 6)
        if source:
            yield _line(shorten(source), 8, "dim")
    if len(same) > MOST_PLACES:
        more = f"... and {counted(len(same) - MOST_PLACES, 'more place')}"
        yield _line(more, 6, "dim")


# -- the lists that the whole report ends with -----------------------------------------


def _prediction(report: Document) -> Iterator[RenderableType]:
    """The predicted times by class of op, and the bound on the speed-up."""
    prediction, headline = report.prediction, report.headline
    if prediction is None or not report.ops:
        return
    figures = (
        f" of ops and casts, forward and backward (figures of {prediction.device})"
    )
    yield _heading("\nPredicted time", figures)
    table = plain_table("", numbers=("number", "in fp32", "as placed"))
    for row in prediction.classes:
        fp32 = seconds_text(row.fp32) if row.fp32 else "-"
        number = f"{row.ops:,}" if row.ops else "-"
        table.add_row(row.title, number, fp32, seconds_text(row.placed))
    table.add_row(
        "together", "", seconds_text(prediction.fp32), seconds_text(prediction.placed)
    )
    yield Padding(table, (0, 0, 0, 2))
    share, limit = prediction.share_that_may_be_low, prediction.limit
    bound = (
        f"; if these took no time: {limit:.1f} times as fast" if limit < 1000 else ""
    )
    yield _line(
        f"{prediction.speed_up:.2f} times as fast as fp32. Of the fp32 time "
        f"{share:.0%} is in ops that may be low{bound}."
    )
    if headline.trains:
        yield _line(
            f"Values kept for the backward: {bytes_text(headline.kept)} instead "
            f"of {bytes_text(headline.kept_fp32)}."
        )
    yield _line(because_of(report))


def _largest_casts(casts: Sequence[CastRow]) -> Iterator[RenderableType]:
    """The casts made at every call, by source line, the largest first."""
    groups: dict[tuple[str, str], list[CastRow]] = defaultdict(list)
    for cast in casts:
        if cast.every_call:
            groups[cast.kind, cast.source].append(cast)
    if not groups:
        return
    sizes = {key: sum(cast.bytes for cast in each) for key, each in groups.items()}
    count, total = sum(map(len, groups.values())), bytes_text(sum(sizes.values()))
    yield _heading(f"\nCasts in each forward ({count:,}, {total}), the largest first")
    for key in sorted(groups, key=lambda key: -sizes[key])[:LISTED]:
        kind, source = key
        producers = ", ".join(dict.fromkeys(op_title(c.producer) for c in groups[key]))
        where = f" at {shorten(source)}" if source else ""
        size = bytes_text(sizes[key])
        yield _line(f"• {len(groups[key])} {kind}, {size}: {producers}{where}")


def _weights(rows: Sequence[WeightRow]) -> Iterator[RenderableType]:
    """The weights with numbers that the low dtype cannot hold."""
    bad = [(row, row.range) for row in rows if row.range and not row.fits]
    if not bad:
        return
    dtype = bad[0][0].dtype
    yield _heading(f"\nWeights out of the range of {dtype} ({len(bad)} of {len(rows)})")
    for row, numbers in bad[:LISTED]:
        problem = f"{numbers.lost:,} of {numbers.count:,} numbers become 0"
        if numbers.too_large or not math.isfinite(numbers.largest):
            problem = f"the largest magnitude is {numbers.largest:.3g}"
        yield _line(f"• {row.name}: {problem}")
    if len(bad) > LISTED:
        yield _line(f"  and {counted(len(bad) - LISTED, 'more weight')}")
