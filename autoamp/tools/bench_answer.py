"""The figures of each way, and the sentence that says whether mixed precision helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoamp.passes.decide.devices import Device
from autoamp.passes.rows import OpRow
from autoamp.passes.speeds.clock import surely_less
from autoamp.report.findings import is_users_choice
from autoamp.report.report import Report
from autoamp.training.meter import UpdateShare

MOST = 0.5
"""A cause is named if it takes this share of a step, or more."""

WORTH = 0.9
"""A larger batch is proposed if autoamp then takes this share of fp32's time."""

_LARGEST = 4096
"""The batch is doubled in search of one that pays, up to this many times its size."""


@dataclass(frozen=True)
class Row:
    """One way to run the model at one batch size.  None stands for "not measured".

    Attributes:
        way: the name of the way: "fp32", "autocast", "autoamp", ".bfloat16()", ...
        kind: "fp32", "tf32", "autocast", "autoamp" or "half".
        compiled: whether inductor compiled the way.
        batch: the number of samples in a step.
        error: the first line of the error at which the way failed; "" if it ran.
        seconds: the median time of a step.
        sigma: the standard deviation of the times, in seconds.
        ratio: the time over fp32's time, the median over the rounds.
        ratio_sigma: the standard deviation of the rounds' ratios.
        times: the time of each timed step, in seconds.
        data_seconds: the median of the part of a step that waited for data, in seconds.
        first_call: seconds of the first step, with its capture or compilation.
        samples: samples a second.
        tokens: tokens a second, where an input is a matrix of integers.
        peak: the most memory held at one time in a step, in bytes.
        saved: bytes saved for the backward.
        moved: bytes that the kernels of forward and backward read and write.
        casts: casts that forward and backward run.
        flops: flops of matrix products, convolutions and attention.
        low_flops: the part of `flops` in fp16 or bf16.
        losses: the loss of each of the first steps.
        updates: the shares of the optimizer's updates that half weights made in these.
        growth: the time of a step of twice the batch over that of this batch; measured
            only for fp32 and autoamp, if autoamp gains little.
        joules: energy of a step.
        energy_from: "nvml", "rapl", or "estimate" from bytes and flops; "" for none.
        co2_grams: CO2 of 1,000 steps, in grams.
        largest_batch: the largest batch within the memory budget.
    """

    way: str
    kind: str
    compiled: bool = False
    batch: int | None = None
    error: str = ""
    seconds: float | None = None
    sigma: float | None = None
    ratio: float | None = None
    ratio_sigma: float | None = None
    times: tuple[float, ...] = field(default=(), repr=False)
    data_seconds: float | None = None
    first_call: float | None = None
    samples: float | None = None
    tokens: float | None = None
    peak: int | None = None
    saved: int | None = None
    moved: int | None = None
    casts: int | None = None
    flops: int | None = None
    low_flops: int | None = None
    losses: tuple[float, ...] = ()
    updates: tuple[UpdateShare, ...] = ()
    growth: float | None = None
    joules: float | None = None
    energy_from: str = ""
    co2_grams: float | None = None
    largest_batch: int | None = None

    @property
    def loss(self) -> float | None:
        """The loss of the last of the first steps."""
        return self.losses[-1] if self.losses else None


@dataclass(frozen=True)
class Evidence:
    """Figures from the report of the converted model that explain its times.

    Shares are of the predicted fp32 time of forward and backward, 0 to 1, and None
    where no time is predicted.

    Attributes:
        pays: whether the device computes faster in the compute dtype than in fp32.
        units: the name of the device's figures.
        arrived: the half dtype in which most of the model's weights arrived, or "".
        float_ops, low_ops: the number of float ops, and of float ops that run low.
        ruled: the share in ops that the user's own rules keep in fp32; where no time
            is predicted, the share of these ops among all float ops.
        ruled_by: the reason of the costliest of these ops.
        stayed: the share in all ops that stay in fp32.
        stayed_because: the reason of the costliest op that stays in fp32.
        launches, memory, arithmetic: the shares of starting ops, of moving bytes, and
            of computing products.
        speed_up: how many times as fast as fp32 the graphs are predicted to be.
        odd_flops: the share of the low products' flops in which a size is no multiple
            of 8; 0 where the device has no tensor cores.
        odd_size, odd_next, odd_module: the size of the largest of these products, the
            next multiple, and the module.
    """

    pays: bool
    units: str
    arrived: str = ""
    float_ops: int = 0
    low_ops: int = 0
    ruled: float = 0.0
    ruled_by: str = ""
    stayed: float | None = None
    stayed_because: str = ""
    launches: float | None = None
    memory: float | None = None
    arithmetic: float | None = None
    speed_up: float | None = None
    odd_flops: float = 0.0
    odd_size: int = 0
    odd_next: int = 0
    odd_module: str = ""


def evidence_from(report: Report, device: Device, half: str = "") -> Evidence:
    """The evidence that a report gives.

    Args:
        device: the device that the model runs on, or for which it was explained.
        half: the half dtype in which the weights arrived, or "".
    """
    rows, times = report.ops, report.prediction
    timed = {op.row.key: op.high.nanoseconds for op in times.ops} if times else {}
    total = times.seconds(placed=False) * 1e9 if times else 0.0
    shares = times.shares(placed=False) if times else {}
    odd, flops = times.odd_product(report.misfits) if times else (None, 0.0)

    def nanoseconds(row: OpRow) -> float:
        return timed.get(row.key, 0.0)

    def share(some: Sequence[OpRow]) -> float:
        if timed:
            return sum(map(nanoseconds, some)) / total if total else 0.0
        return len(some) / len(rows) if rows else 0.0

    def reason(some: Sequence[OpRow]) -> str:
        """The reason of the op that takes most time; without times, moves most."""
        if not some:
            return ""
        return max(some, key=lambda row: (nanoseconds(row), row.bytes)).heading

    high = [row for row in rows if not row.is_low]
    ruled = [row for row in high if is_users_choice(report.section_of(row), row)]
    return Evidence(
        pays=device.pays,
        units=device.name,
        arrived=half,
        float_ops=len(rows),
        low_ops=len(rows) - len(high),
        ruled=share(ruled),
        ruled_by=reason(ruled),
        stayed=share(high) if timed else None,
        stayed_because=reason(high),
        launches=shares.get("launches"),
        memory=shares.get("memory"),
        arithmetic=shares.get("arithmetic"),
        speed_up=report.headline.speed_up,
        odd_flops=flops,
        odd_size=odd.size if odd else 0,
        odd_next=odd.next if odd else 0,
        odd_module=(odd.module or odd.name) if odd else "",
    )


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


def answer(
    rows: Sequence[Row],
    evidence: Evidence | None,
    *,
    work: str,
    low: str,
    interleaved: bool,
) -> Answer:
    """Compares the times of the faster autoamp with those of fp32, and says why.

    The last batch that both were measured at counts.
    """
    base = ours = None
    for batch in dict.fromkeys(row.batch for row in rows):
        ran = [row for row in rows if row.batch == batch and row.ratio is not None]
        plain = [row for row in ran if row.kind == "fp32" and not row.compiled]
        mixed = [row for row in ran if row.kind == "autoamp"]
        if plain and mixed:
            base, ours = plain[0], min(mixed, key=lambda row: row.ratio or 0.0)
    if base is None or ours is None:
        return Answer(None, "unknown: fp32 and autoamp were not both measured")
    helps = _helps(base, ours, interleaved=interleaved)
    known = evidence or Evidence(pays=True, units="")
    cannot = _cannot(known, low)
    reasons = cannot | _reasons(base, ours, known, low, helps=helps)
    why = next((said for said, holds in reasons.items() if holds), "")
    step = "a training step" if work == "training" else "a step"
    where = f" at batch {ours.batch}" if len({row.batch for row in rows}) > 1 else ""
    figure = (
        f"with {ours.way} {step}{where} takes {ours.ratio:.2f} of fp32's time "
        f"(± {ours.ratio_sigma:.2f})"
    )
    if helps:
        return Answer(True, f"yes: {figure}; {why}" if why else f"yes: {figure}")
    is_no = helps is False or any(cannot.values())
    no = "no" if is_no else "no gain was measured"
    said = f"{no}: {why}. As measured, {figure}" if why else f"{no}: {figure}"
    return Answer(helps, said)


def _helps(base: Row, ours: Row, *, interleaved: bool) -> bool | None:
    """Whether autoamp's times are shorter so often that chance is unlikely."""
    count = min(len(base.times), len(ours.times))

    def is_less(one: Row, other: Row) -> bool:
        if interleaved:
            return surely_less(one.times[:count], other.times[:count])
        return max(one.times) < min(other.times)

    if is_less(ours, base):
        # Where nothing ran low, both rows are one model, and the difference is noise.
        return None if ours.low_flops == 0 and ours.casts == 0 else True
    return False if is_less(base, ours) else None


Reasons = dict[str, bool]
"""Sentences, and whether each holds; the first that holds is given."""


def _cannot(known: Evidence, low: str) -> Reasons:
    """The reasons that rule out a gain."""
    return {
        f"the model's weights are {known.arrived} already, so the model runs in "
        f"{known.arrived} without autoamp. To train it with fp32 master weights: "
        "convert(model, optimizer)": bool(known.arrived),
        f"this device ({known.units}) has no units that multiply {low}, so {low} "
        "would be slower than fp32. For the prediction on another device: "
        'autoamp.explain(model, x, device="cuda:sm_80")': not known.pays,
    }


def _reasons(
    base: Row, ours: Row, known: Evidence, low: str, *, helps: bool | None
) -> Reasons:
    """The other reasons, the most certain first."""
    waits = (base.data_seconds or 0.0) / (base.seconds or math.inf)
    # The part of a step that a larger batch does not lengthen.
    fixed = 0.0 if base.growth is None else min(1.0, max(0.0, 2 - base.growth))
    gains = helps and (ours.ratio or 0.0) <= WORTH
    of = "the float ops" if known.stayed is None else "the predicted time"
    ops = f"its {known.float_ops} ops" if known.float_ops > 1 else "ops"
    stayed, speed_up = known.stayed or 0.0, known.speed_up or 0.0
    moved = ""
    if base.moved and ours.moved is not None:
        moved = f", and kernels move {ours.moved / base.moved:.2f} of fp32's bytes"
    compiler = "" if helps else ". A compiler moves less: try --compile"
    low_part = (ours.low_flops or 0) / (ours.flops or 1)
    computes = (known.arithmetic or 0.0) >= MOST and bool(ours.flops)
    return {
        f"{waits:.0%} of a step in fp32 is the wait for data, which no precision "
        "shortens. Load data in other processes first (DataLoader's num_workers=)": (
            waits >= MOST
        ),
        f"rules keep {known.ruled:.0%} of {of} in fp32 ({known.ruled_by}). "
        "report.why(node) names the option to drop": not helps and known.ruled >= MOST,
        f"its matrices are too small: {fixed:.0%} of a step in fp32 is the same for "
        f"twice the batch, which is time to start {ops}; {_larger_batch(base, ours)}": (
            not gains and fixed >= MOST
        ),
        f"{known.odd_flops:.0%} of its flops are in products with a size that is slow "
        f"on tensor cores. Pad {known.odd_size:,} in {known.odd_module} to "
        f"{known.odd_next:,}": known.odd_flops >= MOST,
        f"{stayed:.0%} of the predicted time is in ops that stay fp32 "
        f"({known.stayed_because})": not helps and stayed >= MOST,
        f"most of its time goes to moving memory{moved}{compiler}": (
            (known.memory or 0.0) >= MOST
        ),
        f"by prediction it should be {speed_up:.2f} times as fast. autoamp calibrate"
        " measures the speeds of this machine anew": not helps and speed_up > 1 / WORTH,
        f"most of its time is arithmetic of matrix products, and {low_part:.0%} of "
        f"their flops run in {low}": bool(helps) and computes,
    }


def _larger_batch(base: Row, ours: Row) -> str:
    """From which batch on autoamp takes `WORTH` of fp32's time, or less.

    The time of a step is assumed to be a constant plus a time for each sample.
    """

    def seconds(row: Row, times: int) -> float:
        return min(row.times) * (1 + max(0.0, (row.growth or 1) - 1) * (times - 1))

    times = 2
    while times <= _LARGEST and ours.growth is not None and base.batch is not None:
        if seconds(ours, times) <= WORTH * seconds(base, times):
            return f"from batch {times * base.batch} on it should pay"
        times *= 2
    return "by these figures a larger batch would not help"
