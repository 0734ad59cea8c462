"""The sentence that says whether mixed precision helps a model here, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoamp.benchmark.record import Evidence, Measured, Row
from autoamp.calibrate.clock import surely_less

_OURS = ("autoamp", "tuned")

MOST = 0.5
"""A cause is named if it takes this share of a step, or more."""

WORTH = 0.9
"""A larger batch is proposed if autoamp then takes this share of fp32's time."""

_LARGEST = 4096
"""The batch is doubled in search of one that pays, up to this many times its size."""


@dataclass(frozen=True)
class Answer:
    """Whether autoamp helps, and the sentence that says so.

    Attributes:
        helps: whether a step is surely shorter in mixed precision; None where the times
            leave this open.
        sentence: the answer, with its figure, its reason, and what to do.
    """

    helps: bool | None
    sentence: str


def answer(bench: Measured) -> Answer:
    """Compares the measured times of autoamp with those of fp32, and says why."""
    base, ours = _pair(bench)
    if base is None or ours is None:
        return Answer(None, "unknown: fp32 and autoamp were not both measured")
    helps = _helps(base, ours, bench)
    why = next(_reasons(base, ours, bench, helps=helps), "")
    figure = _figure(ours, bench)
    if helps:
        return Answer(True, f"yes: {figure}; {why}" if why else f"yes: {figure}")
    cannot = bench.evidence is not None and any(_cannot(bench.evidence, ""))
    no = "no" if cannot or helps is False else "no gain was measured"
    said = f"{no}: {why}. As measured, {figure}" if why else f"{no}: {figure}"
    return Answer(helps, said)


def _figure(ours: Row, bench: Measured) -> str:
    step = "a training step" if bench.work == "training" else "a step"
    where = f" at batch {ours.batch}" if len(bench.batches) > 1 else ""
    return (
        f"with {ours.way} {step}{where} takes {ours.ratio:.2f} of fp32's time "
        f"(± {ours.ratio_sigma:.2f})"
    )


def _helps(base: Row, ours: Row, bench: Measured) -> bool | None:
    if _surely_less(ours, base, bench):
        # Where nothing ran low, both rows are one model, and the difference is noise.
        return None if ours.low_flops == 0 and ours.casts == 0 else True
    return False if _surely_less(base, ours, bench) else None


# -- reasons ---------------------------------------------------------------------------


def _reasons(
    base: Row, ours: Row, bench: Measured, *, helps: bool | None
) -> Iterator[str]:
    """The reasons that hold; a reason that rules out all others comes first."""
    known, low = bench.evidence, bench.precision
    if known is not None:
        yield from _cannot(known, low)
    yield from _data(base)
    if known is not None and not helps:
        yield from _ruled(known)
    if not helps or (ours.ratio or 0.0) > WORTH:
        yield from _starts(base, ours, known)
    if known is not None:
        yield from _sizes(known)
        yield from _bound(base, ours, known, low, helps=helps)


def _cannot(known: Evidence, low: str) -> Iterator[str]:
    if known.arrived:
        yield (
            f"the model's weights are {known.arrived} already, so the model runs in "
            f"{known.arrived} without autoamp. To train it with fp32 master weights: "
            "convert(model, optimizer)"
        )
    elif not known.pays:
        yield (
            f"this device ({known.units}) has no units that multiply {low}, so {low} "
            "would be slower than fp32. For the prediction on another device: "
            'autoamp.explain(model, x, device="cuda:sm_80")'
        )


def _data(base: Row) -> Iterator[str]:
    part = (base.data_seconds or 0.0) / (base.seconds or math.inf)
    if part >= MOST:
        yield (
            f"{part:.0%} of a step in fp32 is the wait for data, which no precision "
            "shortens. Load data in other processes first (DataLoader's num_workers=)"
        )


def _ruled(known: Evidence) -> Iterator[str]:
    if known.ruled >= MOST:
        of = "the predicted time" if known.stayed is not None else "the float ops"
        yield (
            f"rules keep {known.ruled:.0%} of {of} in fp32 ({known.ruled_by}). "
            "report.why(node) names the option to drop"
        )


def _starts(base: Row, ours: Row, known: Evidence | None) -> Iterator[str]:
    """The part of a step that does not grow with the batch, as it was measured."""
    part = _fixed_part(base)
    if part is None or part < MOST:
        return
    ops = f"its {known.float_ops} ops" if known and known.float_ops > 1 else "ops"
    pays = _pays_from(base, ours)
    if pays is None:
        more = "by these figures a larger batch would not help"
    else:
        more = f"from batch {pays} on it should pay"
    yield (
        f"its matrices are too small: {part:.0%} of a step in fp32 is the same for "
        f"twice the batch, which is time to start {ops}; {more}"
    )


def _fixed_part(row: Row) -> float | None:
    """The part of a step that a larger batch does not lengthen, 0 to 1."""
    return None if row.growth is None else min(1.0, max(0.0, 2 - row.growth))


def _pays_from(base: Row, ours: Row) -> int | None:
    """The least batch at which autoamp takes `WORTH` of fp32's time, or less.

    The time of a step is assumed to be a constant plus a time for each sample.
    """
    if None in (base.growth, ours.growth, base.batch):
        return None
    times = 2
    while times <= _LARGEST:
        if _at(ours, times) <= WORTH * _at(base, times):
            return times * (base.batch or 1)
        times *= 2
    return None


def _at(row: Row, times: int) -> float:
    """The time of a step at `times` times the batch."""
    assert row.growth is not None
    return min(row.times) * (1 + max(0.0, row.growth - 1) * (times - 1))


def _sizes(known: Evidence) -> Iterator[str]:
    if known.odd_flops >= MOST:
        yield (
            f"{known.odd_flops:.0%} of its flops are in products with a size that is "
            f"slow on tensor cores. Pad {known.odd_size:,} in {known.odd_module} to "
            f"{known.odd_next:,}"
        )


def _bound(
    base: Row, ours: Row, known: Evidence, low: str, *, helps: bool | None
) -> Iterator[str]:
    """The part of the work that low precision shortens, or cannot shorten."""
    stayed = known.stayed or 0.0
    if not helps and stayed >= MOST:
        yield (
            f"{stayed:.0%} of the predicted time is in ops that stay fp32 "
            f"({known.stayed_because})"
        )
    elif (known.memory or 0.0) >= MOST:
        said = f"most of its time goes to moving memory{_moved(base, ours)}"
        yield said if helps else f"{said}. A compiler moves less: try --compile"
    elif not helps and (known.speed_up or 0.0) > 1 / WORTH:
        yield (
            f"by prediction it should be {known.speed_up:.2f} times as fast. "
            "autoamp.tune(model, x) places casts by times measured here"
        )
    elif helps and (known.arithmetic or 0.0) >= MOST and ours.flops:
        part = (ours.low_flops or 0) / ours.flops
        yield (
            f"most of its time is arithmetic of matrix products, and {part:.0%} of "
            f"their flops run in {low}"
        )


def _moved(base: Row, ours: Row) -> str:
    if not base.moved or ours.moved is None:
        return ""
    return f", and kernels move {ours.moved / base.moved:.2f} of fp32's bytes"


# -- times -----------------------------------------------------------------------------


def _surely_less(one: Row, other: Row, bench: Measured) -> bool:
    """Whether one way's times are shorter so often that chance is unlikely."""
    count = min(len(one.times), len(other.times))
    if bench.interleaved:
        return surely_less(one.times[:count], other.times[:count])
    return max(one.times) < min(other.times)


def _pair(bench: Measured) -> tuple[Row | None, Row | None]:
    """The rows of fp32 and of the faster autoamp, at the last batch with both."""
    for batch in reversed(bench.batches):
        rows = [r for r in bench.rows if r.batch == batch and r.ratio is not None]
        base = next((r for r in rows if r.kind == "fp32" and not r.compiled), None)
        ours = [r for r in rows if r.kind in _OURS]
        if base is not None and ours:
            return base, min(ours, key=lambda r: r.ratio or 0.0)
    return None, None
