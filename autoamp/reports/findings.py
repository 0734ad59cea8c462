"""What a report makes of its figures: the gains, why they are so, and advice.

`print(report)` and the page take names, units and rounding of the figures from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from autoamp.messages import (
    CANNOT_PAY,
    advice,
    bytes_text,
    counted,
    not_captured,
    op_title,
    seconds_text,
)
from autoamp.passes.functions import laid_out
from autoamp.passes.report_rows import OpRow
from autoamp.passes.write.layouts import LAST
from autoamp.reports.casts import compiled_text, counts_text
from autoamp.reports.figures import (
    Document,
    Headline,
    Prediction,
)
from autoamp.training.meter import UpdateShare

# -- updates of half-precision weights -------------------------------------------------

_KINDS = {"norm": "norm weight", "bias": "bias vector", "embedding": "embedding"}

_ARRIVES = 0.9
"""Advice is given where a smaller share of the updates arrives."""


def update_text(found: UpdateShare) -> str:
    """A sentence on the updates of one kind of weights."""
    weights = counted(found.weights, _KINDS.get(found.kind, "other weight"))
    return (
        f"{found.dtype} rounds away {max(0.0, 1 - found.share):.0%} of the updates of "
        f"{weights}."
    )


# -- what runs low, and the gain -------------------------------------------------------

NOTHING_YET = "no graph captured yet: call the model once, then ask again"

WAYS = ("fp32", "torch.autocast*", "autoamp")
"""The columns of the table of gains; the footnote explains the star."""

FOOTNOTE = (
    "* the same graphs as torch.autocast would place them: predicted, not measured."
)

ERROR = (
    "The error of rounding is not predicted: autoamp.compare(model, x) measures it "
    "beside fp32 and torch.autocast."
)


def gains_of(headline: Headline, low: str) -> tuple[str, list[tuple[str, ...]], str]:
    """The title of the table of gains, its rows, and the sentence below it.

    A row is a name, and a figure for each of `WAYS`.
    """
    source = f" (predicted for {headline.device})" if headline.device else ""
    rows: list[tuple[str, ...]] = []
    times = (headline.seconds_fp32, headline.seconds_autocast, headline.seconds)
    if headline.seconds is not None:
        work = (
            "time of forward and backward" if headline.trains else "time of a forward"
        )
        rows.append((work, *(seconds_text(seconds or 0.0) for seconds in times)))
    if headline.trains:
        sizes = (headline.kept_fp32, headline.kept_autocast, headline.kept)
        rows.append(("values kept for the backward", *map(bytes_text, sizes)))
    if headline.speed_up is not None:
        sentence = (
            f"{headline.speed_up:.2f} times as fast as fp32, "
            f"{headline.speed_up_over_autocast:.2f} times as fast as torch.autocast."
        )
    else:
        forced = advice("do_no_harm", False, by_variables=False)
        sentence = (
            f"No time is predicted: {low} is no faster than fp32 on this device, and "
            f"runs only because of {forced}."
        )
    return f"What it should gain here{source}", rows, sentence


def memory_text(report: Document) -> str:
    """The memory of a training step in two sentences, "" where it is not known."""
    memory = report.memory
    if memory is None:
        return ""
    usual, *others = memory.states
    parts = {
        "weights": memory.weights,
        f"copies in {report.compute_dtype}": memory.copies,
        "gradients": memory.gradients,
        f"state of {usual}": memory.states[usual],
        f"kept for the backward{'' if memory.is_counted else ', at most'}": memory.kept,
    }
    held = " + ".join(f"{bytes_text(n)} ({name})" for name, n in parts.items() if n)
    less = " and ".join(
        f"{bytes_text(memory.total(name))} with {name}" for name in others
    )
    return (
        f"Memory of a training step with {usual}: {bytes_text(memory.total(usual))} = "
        f"{held}. It is {less}."
    )


def runs_low(report: Document, low: str) -> Iterator[str]:
    """Sentences on low ops, casts, kernels, layouts and the captured graphs."""
    headline = report.headline
    share = ""
    if headline.share_of_time_low:
        share = f"; in fp32 they take {headline.share_of_time_low:.0%} of the time"
    ops = counted(headline.float_ops, "float op")
    where, shares = "", report.coverage
    if shares is not None and shares.calls_aside and not report.explained_for:
        ran = shares.calls - shares.calls_aside
        where = f" in {ran:,} of {counted(shares.calls, 'call')}"
    yield f"{headline.low_ops:,} of {ops} run in {low}{where}{share}."
    yield counts_text(report.cast_counts, low)
    yield from compiled_text(report.sections)
    yield from kernels_text(report.ops)
    yield from layouts_text(report.graphs)
    graphs = f"{counted(len(report.graphs), 'graph')} captured"
    if report.explained_for:
        yield f"{graphs}; nothing was converted: convert() would do this."
    else:
        yield f"{graphs}; rewritten graphs ran {counted(report.runs, 'time')}."


def kernels_text(ops: Sequence[OpRow]) -> list[str]:
    """A line on the chains that run as kernels; no line where there are none."""
    fused = [row.kernel for row in ops if row.kernel]
    if not fused:
        return []
    names = sorted(dict.fromkeys(fused), key=lambda name: -fused.count(name))
    named = ", ".join(f"{name} ({fused.count(name):,})" for name in names)
    calls = counted(sum(row.calls for row in ops if row.kernel), "op")
    return [f"{calls} of the model run as {counted(len(fused), 'kernel')}: {named}."]


def layouts_text(graphs: Sequence[fx.GraphModule]) -> list[str]:
    """How many ops have their channels last; no line where no op has."""
    nodes = [node for gm in graphs for node in gm.graph.nodes]
    last = sum(LAST in n.meta and n.op == "call_function" for n in nodes)
    if not last:
        return []
    changed = counted(sum(node.target is laid_out for node in nodes), "change")
    run = "runs" if last == 1 else "run"
    return [f"{counted(last, 'op')} {run} with channels last ({changed} of layout)."]


# -- why the predicted speed-up is what it is ------------------------------------------

LARGER = 8
"""Where a larger batch would help, the speed-up is given at so many times the batch."""


def because_of(report: Document) -> str:
    """Why the predicted speed-up is what it is, and what would raise it most.

    Up to four sentences; one sentence where no gain is predicted.
    """
    headline, times = report.headline, report.prediction
    if not headline.float_ops:
        return "No time is predicted, because no float op was captured."
    if not headline.pays or times is None:
        return (
            "No time is predicted, because low precision is no faster than fp32 on "
            "this device."
        )
    if not headline.low_ops:
        return (
            "The prediction is that of fp32, because every op stays in fp32: "
            "report.stayed has the reasons."
        )
    low = (
        f"Ops that run in low precision take {times.share_low:.0%} of the predicted "
        f"fp32 time of {seconds_text(times.seconds(placed=False))}."
    )
    change = _change(times)
    return " ".join([low, _parts(times), _largest(times), change])


def _parts(times: Prediction) -> str:
    """The parts of the fp32 time, the largest first, and of the time as placed."""
    total, as_placed = (times.seconds(placed=each) for each in (False, True))
    before, after = (times.shares(placed=each) for each in (False, True))
    words = {
        "arithmetic": "the arithmetic of products",
        "memory": "memory",
        "launches": "starts of kernels",
    }
    names = sorted(words, key=lambda name: before[name], reverse=True)
    waits = [
        f"{words[n]} {seconds_text(before[n] * total)} ({before[n]:.0%})" for n in names
    ]
    now = [seconds_text(after[n] * as_placed) for n in names]
    casts = seconds_text(times.casts)
    return (
        f"In fp32 the time goes to {waits[0]}, {waits[1]} and {waits[2]}; as placed "
        f"these take {now[0]}, {now[1]} and {now[2]}, and casts {casts}."
    )


def _largest(times: Prediction) -> str:
    """The op that takes most, with its kernel's size and its module."""
    op = max(times.ops, key=lambda op: op.high.nanoseconds)
    share = op.high.nanoseconds * 1e-9 / times.seconds(placed=False)
    row, flops = op.row, sum(each.row.flops for each in times.ops)
    arithmetic = f" and {row.flops / flops:.0%} of the arithmetic" if row.flops else ""
    name = op_title(row.op)
    if op.kernel:
        name = f"the convolution of {' x '.join(map(str, op.kernel))}"
    if row.module:
        name += f" in module {row.module}"
    return f"The op that takes most is {name}: {share:.0%} of the time{arithmetic}."


def _change(times: Prediction) -> str:
    """The change that would help most: it shortens the largest part of the time."""
    parts = _left(times)
    largest = max(parts, key=lambda name: parts[name])
    size = (
        f"{seconds_text(parts[largest])} of the "
        f"{seconds_text(times.seconds(placed=True))} that are left"
    )
    match largest:
        case "launches" | "weights":
            why = "starts of kernels" if largest == "launches" else "reading weights"
            now, then = (
                times.seconds(placed=False, times=batch)
                / times.seconds(placed=True, times=batch)
                for batch in (1, LARGER)
            )
            return (
                f"A larger batch would help most, because {why} take {size}: at "
                f"{LARGER} times the batch a speed-up of {then:.2f} is predicted, "
                f"instead of {now:.2f}."
            )
        case "memory":
            return (
                'A compiler (backend="inductor"), which joins ops so that they move '
                f"less data, would help most, because memory takes {size}."
            )
        case "stayed":
            return (
                "Dropping the rule or the option that keeps ops in fp32 would help "
                f"most, because these ops take {size}: report.stayed has the reasons."
            )
        case "casts":
            return (
                f"Fewer casts would help most, because casts take {size}: "
                "report.islands shows the fp32 ops that they surround."
            )
    return (
        f"Only less arithmetic would help much: low precision at its full speed takes "
        f"{size}."
    )


def _left(times: Prediction) -> Mapping[str, float]:
    """The parts of the time as placed, in seconds; fp32 ops are one part."""
    left = dict.fromkeys(("launches", "arithmetic", "memory", "weights", "stayed"), 0.0)
    for op in times.ops:
        parts = op.placed
        left["launches"] += parts.launch * 1e-9
        rest = (parts.nanoseconds - parts.launch) * 1e-9
        if not op.row.is_low:
            left["stayed"] += rest
        elif parts.arithmetic > parts.memory:
            left["arithmetic"] += rest
        else:
            # A product at a small batch is bound by its weights, which no compiler
            # can read less often.
            left["weights" if op.by_weights > 0.5 else "memory"] += rest
    return {**left, "casts": times.casts}


# -- advice ----------------------------------------------------------------------------

MOST = 2
"""The most pieces of advice that one report gives."""

LITTLE = 1.2
"""Below this predicted speed-up the report says why the model gains so little."""


def advice_of(report: Document) -> tuple[str, ...]:
    """At most `MOST` sentences; where nothing would help, one sentence that says so."""
    if report.compute_dtype is None:
        if lost := tuple(_updates(report.updates)):
            return lost
        if any(CANNOT_PAY in why for _, why in report.skipped):
            ask = advice("device", "cuda:sm_80", by_variables=False)
            return (f"Nothing on this device. For a GPU, explain it with {ask}.",)
        return ("Nothing, unless the reason above names an option.",)
    pieces = tuple(_found(report))[:MOST]
    return pieces or (
        "Nothing to change. autoamp.compare(model, x) measures the error of rounding.",
    )


def _found(report: Document) -> Iterator[str]:
    state = report.loss_scale
    if (
        state is not None
        and not state.foreign
        and state.skipped_steps
        and state.growth_tracker == 0
    ):
        yield (
            "The last step was skipped, because a gradient overflowed. If steps are "
            "skipped again and again, autoamp.find_overflow(model, x) names the op and "
            "the option that helps."
        )
    yield from _updates(report.updates)
    if report.headline.low_ops and not report.headline.pays:
        yield (
            f"Leave out {advice('do_no_harm', False, by_variables=False)}: the model "
            "then stays in fp32, which is faster on this device."
        )
    bad = [row for row in report.weights if not row.fits]
    if bad:
        names = ", ".join(row.name for row in bad[:2])
        names += ", ..." if len(bad) > 2 else ""
        yield (
            f"{counted(len(bad), 'weight')} ({names}) out of the range of "
            f"{bad[0].dtype}: use {advice('precision', 'bf16', by_variables=False)}, "
            f"or {advice('keep', ['PATH'], by_variables=False)} with their modules."
        )
    yield from _calls(report)
    yield from _little(report)


def _updates(shares: Sequence[UpdateShare]) -> Iterator[str]:
    lost = [share for share in shares if share.share < _ARRIVES]
    if lost:
        worst = update_text(min(lost, key=lambda share: share.share))
        yield (
            f"{worst} fp32 masters keep them, at 2 bytes a weight: "
            "autoamp.convert(model, optimizer), or AUTOAMP_MASTERS=split."
        )


def _calls(report: Document) -> Iterator[str]:
    calls = report.coverage
    if calls is not None and calls.calls_aside:
        yield (
            f"{calls.calls_aside:,} of {counted(calls.calls, 'call')} ran no rewritten "
            "graph; report.skipped says why."
        )
    if report.unwatched:
        yield (
            f"{counted(report.unwatched, 'weight')} are copied at every call, because "
            "other code may hold their memory. If no other code needs that memory: "
            "p.data = p.data.clone()."
        )
    if calls is not None and report.runs > calls.calls - calls.calls_aside > 0:
        yield (
            "A call runs several graphs, because code between the graphs cannot be "
            "captured; values between graphs are fp32. TORCH_LOGS=graph_breaks shows "
            "the lines of that code."
        )
    if not_captured(report.skipped):
        yield (
            "What was not captured runs in fp32, unless report.skipped, which names "
            "lines and reasons, says torch.autocast."
        )


def _little(report: Document) -> Iterator[str]:
    """Why the model gains little, if it gains little."""
    headline = report.headline
    if (
        headline.speed_up is None
        or headline.speed_up >= LITTLE
        or not headline.seconds_fp32
    ):
        return
    launches = (headline.seconds_of_launches or 0.0) / headline.seconds_fp32
    limit = report.prediction.limit if report.prediction else LITTLE
    if limit < LITTLE:
        yield (
            "No option helps: most of the time is in ops that must stay fp32, so the "
            f"model cannot become more than {limit:.2f} times as fast as in fp32."
        )
    elif launches > 0.5:
        yield (
            f"The ops are too small to gain: starting them takes {launches:.0%} of the "
            "predicted fp32 time. A larger batch would gain more."
        )
