"""Advice on the option or command that would help a model most, with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoamp.analyse.pins import kept_by
from autoamp.inspect.costs import seconds_text
from autoamp.inspect.document import Document
from autoamp.inspect.remedy import remedy_for
from autoamp.inspect.rows import OpRow, Section
from autoamp.inspect.sections.dimensions import MULTIPLE
from autoamp.inspect.sections.headline import Headline
from autoamp.inspect.sections.loss_scaling import LossScaleReport
from autoamp.inspect.sections.weights import WeightRow
from autoamp.inspect.text import CANNOT_PAY, counted, not_captured, one_name
from autoamp.messages import advice
from autoamp.place.cost import UNIT_NS

MOST = 2
"""The most pieces of advice that one report gives."""

LITTLE = 1.2
"""Below this predicted speed-up the report says why the model gains so little."""

WORTH = 0.05
"""A change of options is proposed if it saves this share of the predicted time."""


def advice_of(report: Document) -> tuple[str, ...]:
    """At most `MOST` sentences; where nothing would help, one sentence that says so."""
    if report.compute_dtype is None:
        return (_unconverted(report.skipped),)
    found = tuple(_found(report))[:MOST]
    return found or (
        "Nothing to change. autoamp.compare(model, x) measures the error of rounding.",
    )


def _unconverted(skipped: Sequence[tuple[str, str]]) -> str:
    if any(CANNOT_PAY in why for _, why in skipped):
        ask = 'autoamp.explain(model, x, device="cuda:sm_80")'
        return f"Nothing on this device. For a GPU: {ask}."
    return "Nothing, unless the reason above names an option."


def _found(asked: Document) -> Iterator[str]:
    yield from _overflows(asked.loss_scale)
    yield from _no_faster(asked.headline)
    yield from _weights(asked.weights)
    yield from _calls(asked)
    yield from _own_options(asked)
    yield from _little(asked)
    yield from _sizes(asked)


def _overflows(state: LossScaleReport | None) -> Iterator[str]:
    if state is None or state.foreign or not state.skipped_steps:
        return
    if state.growth_tracker == 0:
        yield (
            "The last step was skipped, because a gradient overflowed. If steps are "
            "skipped again and again, autoamp.find_overflow(model, x) names the op and "
            "the option that helps."
        )


def _no_faster(found: Headline) -> Iterator[str]:
    if found.low_ops and not found.pays:
        yield (
            f"Leave out {advice('do_no_harm', False, by_variables=False)}: the model "
            "then stays in fp32, which is faster on this device."
        )


def _weights(rows: Sequence[WeightRow]) -> Iterator[str]:
    bad = [row.name for row in rows if not row.fits]
    if bad:
        names = ", ".join(bad[:2]) + (", ..." if len(bad) > 2 else "")
        yield (
            f"{counted(len(bad), 'weight')} ({names}) out of the range of "
            f"{rows[0].dtype}: use {advice('precision', 'bf16', by_variables=False)}, "
            f"or {advice('keep', ['PATH'], by_variables=False)} with their modules."
        )


def _calls(asked: Document) -> Iterator[str]:
    calls = asked.coverage
    if calls is not None and calls.calls_aside:
        yield (
            f"{calls.calls_aside:,} of {counted(calls.calls, 'call')} ran no rewritten "
            "graph; report.skipped says why."
        )
    if asked.unwatched:
        yield (
            f"{counted(asked.unwatched, 'weight')} are copied at every call, because "
            "other code may hold their memory. If no other code needs that memory: "
            "p.data = p.data.clone()."
        )
    if calls is not None and asked.runs > calls.calls - calls.calls_aside > 0:
        yield (
            "A call runs several graphs, because code between the graphs cannot be "
            "captured; values between graphs are fp32. TORCH_LOGS=graph_breaks shows "
            "the lines of that code."
        )
    if not_captured(asked.skipped):
        yield (
            "The parts that were not captured run in fp32; report.skipped names their "
            "lines and the reasons."
        )


def _own_options(asked: Document) -> Iterator[str]:
    """The gain of dropping an option that keeps the costliest ops in fp32."""
    total = asked.headline.seconds
    for group in asked.stayed:
        row = group.costliest
        if not total or (group.seconds or 0) < WORTH * total:
            return
        section = asked.section_of(row)
        if not is_users_choice(section, row):
            continue
        remedy = remedy_for(section.rewritten, row.name)
        if remedy is None or remedy.in_bytes:
            continue
        saved = -remedy.extra * UNIT_NS * 1e-9
        if saved >= WORTH * total:
            yield (
                f"{remedy.words[0].upper()}{remedy.words[1:]} would save "
                f"{seconds_text(saved)} of {seconds_text(total)}, by prediction."
            )
            return


def is_users_choice(section: Section, row: OpRow) -> bool:
    """Whether `keep=` or another option of the user's holds an op in fp32."""
    options = section.rewritten.options
    if options is None:
        return False
    modules = section.rewritten.facts.nodes[row.name].modules
    kept = kept_by(options.keep, modules) is not None
    return kept or row.origin.endswith("=")


def _little(asked: Document) -> Iterator[str]:
    """Why the model gains little, if it gains little."""
    found = asked.headline
    if found.speed_up is None or found.speed_up >= LITTLE or not found.seconds_fp32:
        return
    assert found.seconds_of_launches is not None
    launches = found.seconds_of_launches / found.seconds_fp32
    limit = asked.prediction.limit if asked.prediction else LITTLE
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


def _sizes(asked: Document) -> Iterator[str]:
    """A size to pad to a multiple; sizes up to `MULTIPLE` itself belong to inputs."""
    for each in asked.misfits:
        if each.size <= MULTIPLE:
            continue
        same = [m.module or m.name for m in asked.misfits if m.size == each.size]
        kind = "modules" if len(set(same)) > 1 else "module"
        where = f"{kind} {one_name(same)}" if each.module else one_name(same)
        yield (
            f"Pad the size {each.size:,} in {where} to {each.next:,} if you can: "
            f"tensor cores work fastest on multiples of {MULTIPLE}."
        )
        return
