"""`Bench`: the figures of the ways to run a model, as one table and one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from autoamp.messages import bytes_text, seconds_text
from autoamp.passes.speeds.clock import surely_less
from autoamp.printed import Line, Printed, Table
from autoamp.reports.findings import update_text
from autoamp.training.meter import UpdateShare

SCHEMA = 1
"""The version of the JSON; raised when a field changes its meaning or is removed."""


@dataclass(frozen=True)
class Row:
    """One way to run the model.  None stands for "not measured".

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
        casts: casts that forward and backward run.
        flops: flops of matrix products, convolutions and attention.
        low_flops: the part of `flops` in fp16 or bf16.
        deviation: the relative error of the first step's output, beside fp32's.
        losses: the loss of each of the first steps.
        updates: the shares of the optimizer's updates that half weights made in these.
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
    casts: int | None = None
    flops: int | None = None
    low_flops: int | None = None
    deviation: float | None = None
    losses: tuple[float, ...] = ()
    updates: tuple[UpdateShare, ...] = ()

    @property
    def loss(self) -> float | None:
        """The loss of the last of the first steps."""
        return self.losses[-1] if self.losses else None


@dataclass(frozen=True)
class Answer:
    """Whether autoamp helps, and the sentence that says so.

    Attributes:
        helps: whether a step is surely shorter in mixed precision; None where the times
            leave this open.
        sentence: the answer, with its figure.
    """

    helps: bool | None
    sentence: str


@dataclass(frozen=True, repr=False)
class Bench(Printed):
    """The measurements of `autoamp.bench`; `print(bench)` shows them.

    `bench.rows` holds one row for each way, fp32 first; `bench.row("autoamp").ratio` is
    one figure of a row.

    Attributes:
        label: the model's class name.
        device: the hardware.
        torch: the version of torch.
        precision: the compute dtype of the low ways: "bf16" or "fp16".
        work: "training", "inference" or "generate N".
        loss_from: how the loss was made, in words; "" where nothing was trained.
        rows: the ways, fp32 first.
        rounds: how many steps of each way were timed.
        interleaved: whether all ways were timed in turn.
        memory_how: how the peak memory was measured.
        no_gain: why nothing can be gained, with the option to try; "" for no reason.
        notes: sentences that qualify the figures.
        complete: False if the measurement was interrupted.
        measured_seconds: how long the measurement took.
    """

    label: str
    device: str
    torch: str
    precision: str
    work: str
    loss_from: str
    rows: tuple[Row, ...]
    rounds: int
    interleaved: bool
    memory_how: str
    no_gain: str = ""
    notes: tuple[str, ...] = ()
    complete: bool = True
    measured_seconds: float = 0.0

    def row(self, way: str) -> Row:
        """The row of a way.

        Raises:
            KeyError: there is no such row.
        """
        for row in self.rows:
            if row.way == way:
                return row
        raise KeyError(f"no row {way!r}; there are {[r.way for r in self.rows]}")

    @property
    def answer(self) -> Answer:
        """Whether the faster autoamp takes less time than fp32, in a sentence."""
        ran = [row for row in self.rows if row.ratio is not None]
        plain = [row for row in ran if row.kind == "fp32" and not row.compiled]
        mixed = [row for row in ran if row.kind == "autoamp"]
        if not (plain and mixed):
            return Answer(None, "unknown: fp32 and autoamp were not both measured")
        ours = min(mixed, key=lambda row: row.ratio or 0.0)
        helps = self._helps(plain[0], ours)
        step = "a training step" if self.work == "training" else "a step"
        figure = (
            f"with {ours.way} {step} takes {ours.ratio:.2f} of fp32's time "
            f"(± {ours.ratio_sigma:.2f})"
        )
        if helps:
            times = 1 / (ours.ratio or 1.0)
            return Answer(True, f"yes: {figure}, and is {times:.2f} times as fast")
        if self.no_gain:
            return Answer(helps, f"no: {self.no_gain}. As measured, {figure}")
        no = "no gain was measured" if helps is None else "no"
        return Answer(helps, f"{no}: {figure}")

    def _helps(self, base: Row, ours: Row) -> bool | None:
        """Whether autoamp's times are shorter so often that chance is unlikely."""
        count = min(len(base.times), len(ours.times))

        def is_less(one: Row, other: Row) -> bool:
            if self.interleaved:
                return surely_less(one.times[:count], other.times[:count])
            return max(one.times) < min(other.times)

        if is_less(ours, base):
            # Where nothing ran low, both rows are one model; the difference is noise.
            return None if ours.low_flops == 0 and ours.casts == 0 else True
        return False if is_less(base, ours) else None

    def to_json(self) -> str:
        """All figures as JSON; `schema` is the version of its fields."""
        figures = {"schema": SCHEMA, "answer": self.answer.sentence, **asdict(self)}
        return json.dumps(_plain(figures), indent=2, allow_nan=False) + "\n"

    def parts(self) -> Iterator[Line | Table]:
        """The answer, the table, and the small print."""
        sentence = self.answer.sentence
        yield Line(f"{sentence[0].upper()}{sentence[1:]}.", "head")
        model = f"{self.label}, {self.work}, {self.precision}, on {self.device}"
        yield Line(f"autoamp bench: {model}")
        yield Line("")
        ran = [row for row in self.rows if row.seconds is not None]
        if ran:
            columns = {
                name: [cell(row) for row in ran] for name, cell in _COLUMNS.items()
            }
            # Without the columns that are empty in every row.
            columns = {name: texts for name, texts in columns.items() if any(texts)}
            names = [row.way for row in ran]
            texts = [*map(list, zip(names, *columns.values(), strict=True))]
            yield Table(["way", *columns], texts)
            yield Line("")
        for row in self.rows:
            if row.error:
                yield Line(f"{row.way} failed: {row.error}", "failure")
        for line in self._small_print():
            yield Line(line, "note")

    def _small_print(self) -> Iterator[str]:
        turn = "in turn" if self.interleaved else "one way after the other"
        spread = "± their standard deviation"
        yield f"Times: medians of {self.rounds} steps {spread}, {turn}."
        if any(row.deviation is not None for row in self.rows):
            yield "Error: of the first step's output, relative to that of fp32."
        if self.loss_from:
            yield f"The loss of a step is {self.loss_from}."
        for row in self.rows:
            yield from (f"{row.way}: {update_text(each)}" for each in row.updates[:1])
        if any(row.peak is not None for row in self.rows):
            yield f"Peak memory: {self.memory_how}."
        for note in self.notes:
            yield f"{note}."
        yield f"{self.measured_seconds:.0f} s in all, torch {self.torch}."

    def __repr__(self) -> str:
        return f"<autoamp.Bench of {self.label}: {len(self.rows)} rows>"


def _data(row: Row) -> str:
    if row.data_seconds is None or not row.seconds:
        return ""
    return f"{row.data_seconds / row.seconds:.0%}"


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "step": lambda row: seconds_text(row.seconds or 0.0),
    "of fp32": lambda row: (
        "" if row.ratio is None else f"{row.ratio:.2f} ± {row.ratio_sigma:.2f}"
    ),
    "data": _data,
    "peak": lambda row: "" if row.peak is None else bytes_text(row.peak),
    "error": lambda row: "" if row.deviation is None else f"{row.deviation:.2g}",
    "casts": lambda row: "" if row.casts is None else f"{row.casts:,}",
}
"""The text of a row in each column; "" where the row has no such figure."""


def _plain(value: Any) -> Any:
    """The value with null for each number that JSON lacks: NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
