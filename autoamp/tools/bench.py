"""`Bench`: the figures of the ways to run a model, as tables and as a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from autoamp.messages import bytes_text, seconds_text
from autoamp.printed import Line, Table
from autoamp.report.findings import update_text
from autoamp.tools.bench_answer import Answer, Evidence, Row, answer
from autoamp.tools.results import Result


@dataclass(frozen=True, repr=False)
class Bench(Result):
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
        rows: the ways, fp32 first; all ways of a batch size stand together.
        rounds: how many steps of each way were timed.
        interleaved: whether all ways of a batch size were timed in turn.
        memory_how: how the peak memory was measured.
        energy_how: how the energy was measured, or why it was not.
        evidence: figures from the report of the converted model that explain the times;
            None if autoamp did not run.
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
    energy_how: str
    evidence: Evidence | None = None
    notes: tuple[str, ...] = ()
    complete: bool = True
    measured_seconds: float = 0.0

    def row(self, way: str, batch: int | None = None) -> Row:
        """The row of a way.

        Args:
            batch: the batch size; by default the first that was measured.

        Raises:
            KeyError: there is no such row.
        """
        for row in self.rows:
            if row.way == way and batch in (None, row.batch):
                return row
        raise KeyError(f"no row {way!r}; there are {[r.way for r in self.rows]}")

    @property
    def batches(self) -> tuple[int | None, ...]:
        """The batch sizes that were measured."""
        return tuple(dict.fromkeys(row.batch for row in self.rows))

    @property
    def answer(self) -> Answer:
        """Whether mixed precision helps, in a sentence."""
        return answer(
            self.rows,
            self.evidence,
            work=self.work,
            low=self.precision,
            interleaved=self.interleaved,
        )

    def document(self) -> dict[str, Any]:
        """The figures that `to_json` writes."""
        return {"answer": self.answer.sentence, **super().document()}

    def parts(self) -> Iterator[Line | Table]:
        """The answer, the tables, and the small print."""
        sentence = self.answer.sentence
        yield Line(f"{sentence[0].upper()}{sentence[1:]}.", "head")
        model = f"{self.label}, {self.work}, {self.precision}, on {self.device}"
        yield Line(f"autoamp bench: {model}")
        yield Line("")
        for batch in self.batches:
            if len(self.batches) > 1:
                yield Line(f"batch {batch}", "title")
            rows = [row for row in self.rows if row.batch == batch]
            for cells in _TABLES:
                table = _table(rows, cells)
                if table is not None:
                    yield table
                    yield Line("")
            for row in rows:
                if row.error:
                    yield Line(f"{row.way} failed: {row.error}", "failure")
        for line in self._small_print():
            yield Line(line, "note")

    def _small_print(self) -> Iterator[str]:
        turn = "in turn" if self.interleaved else "one way after the other"
        spread = "± their standard deviation"
        yield f"Times: medians of {self.rounds} steps {spread}, {turn}."
        if self.loss_from:
            step = max((len(row.losses) for row in self.rows), default=0)
            equal = "from equal weights and data"
            yield f"Loss: {self.loss_from}, at step {step}, {equal}."
        for row in self.rows:
            yield from (f"{row.way}: {update_text(each)}" for each in row.updates[:1])
        if any(row.peak is not None for row in self.rows):
            yield f"Peak memory: {self.memory_how}."
        yield f"Energy: {self.energy_how}."
        for note in self.notes:
            yield f"{note}."
        yield f"{self.measured_seconds:.0f} s in all, torch {self.torch}."

    def to_svg(self) -> str:
        """A bar plot of the times, fp32 = 1, as SVG."""
        return _svg(self)

    def __repr__(self) -> str:
        return f"<autoamp.Bench of {self.label}: {len(self.rows)} rows>"


# -- tables ----------------------------------------------------------------------------

Cells = dict[str, Callable[[Row], str]]
"""The text of a row in each column; "" where the row has no such figure."""


def _table(rows: Sequence[Row], cells: Cells) -> Table | None:
    """A table of the ways that ran, without empty columns."""
    ran = [row for row in rows if row.seconds is not None]
    columns = {name: [cell(row) for row in ran] for name, cell in cells.items()}
    columns = {name: texts for name, texts in columns.items() if any(texts)}
    if not columns:
        return None
    names = [row.way for row in ran]
    return Table(
        ["way", *columns], [*map(list, zip(names, *columns.values(), strict=True))]
    )


def _time(row: Row) -> str:
    return f"{seconds_text(row.seconds or 0.0)} ± {seconds_text(row.sigma or 0.0)}"


def _ratio(row: Row) -> str:
    return "" if row.ratio is None else f"{row.ratio:.2f} ± {row.ratio_sigma:.2f}"


def _data(row: Row) -> str:
    if row.data_seconds is None or not row.seconds:
        return ""
    return f"{row.data_seconds / row.seconds:.0%}"


def _joules(row: Row) -> str:
    about = "about " if row.energy_from == "estimate" else ""
    return "" if row.joules is None else about + _three(row.joules)


def _bytes(number: int | None) -> str:
    return "" if number is None else bytes_text(number)


def _whole(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _three(value: float | None) -> str:
    """Three digits, or all digits before the point: 0.0123, 26.3, 2,630."""
    if value is None:
        return ""
    is_long = math.isfinite(value) and abs(value) >= 100
    return f"{value:,.0f}" if is_long else f"{value:.3g}"


_TABLES: tuple[Cells, ...] = (
    {
        "time a step": _time,
        "of fp32": _ratio,
        "samples/s": lambda row: _three(row.samples),
        "tokens/s": lambda row: _three(row.tokens),
        "data": _data,
    },
    {
        "peak": lambda row: _bytes(row.peak),
        "saved": lambda row: _bytes(row.saved),
        "moved": lambda row: _bytes(row.moved),
        "casts": lambda row: _whole(row.casts),
        "loss": lambda row: "" if row.loss is None else f"{row.loss:.5g}",
    },
    {
        "first step": lambda row: (
            "" if row.first_call is None else seconds_text(row.first_call)
        ),
        "J a step": _joules,
        "g CO2 of 1,000": lambda row: _three(row.co2_grams),
        "max batch": lambda row: _whole(row.largest_batch),
    },
)
"""Three tables, because one would be wider than a terminal."""


# -- plot ------------------------------------------------------------------------------

_COLOURS = {
    "fp32": "#9aa0a6",
    "tf32": "#5f6368",
    "autocast": "#e69f00",
    "autoamp": "#0072b2",
    "half": "#009e73",
}
_LEFT, _BARS, _RIGHT = 210, 420, 130
_LINE, _TOP = 26, 46
_STYLE = "<style>text{font:13px sans-serif;fill:#333}</style>"


def _svg(bench: Bench) -> str:
    """A bar for each way that ran, as long as its time, with fp32 = 1."""
    rows = [row for row in bench.rows if row.ratio is not None]
    ends = [(row.ratio or 0.0) + (row.ratio_sigma or 0.0) for row in rows]
    scale = _BARS / max([1.0, *ends])
    height = _TOP + _LINE * len(rows) + 16
    size = f'width="{_LEFT + _BARS + _RIGHT}" height="{height}"'
    title = f"Time of a step, fp32 = 1: {bench.label}, {bench.work}, {bench.precision}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        _STYLE,
        '<rect width="100%" height="100%" fill="white"/>',
        _text(10, 20, title),
        _text(10, 36, bench.device),
    ]
    for place, row in enumerate(rows):
        batch = f", batch {row.batch}" if len(bench.batches) > 1 else ""
        parts += _bar(row, row.way + batch, _TOP + _LINE * place, scale)
    one = _LEFT + scale
    across = f'x1="{one:.1f}" x2="{one:.1f}" y1="{_TOP}" y2="{height - 10}"'
    parts += [f'<line {across} stroke="#333" stroke-dasharray="3 3"/>', "</svg>"]
    return "\n".join(parts) + "\n"


def _bar(row: Row, name: str, top: float, scale: float) -> list[str]:
    """A row's name, its bar, its spread and its figures."""
    ratio = row.ratio or 0.0
    width, spread = ratio * scale, (row.ratio_sigma or 0.0) * scale
    middle = top + _LINE / 2
    box = f'x="{_LEFT}" y="{top + 4}" width="{width:.1f}" height="{_LINE - 8}"'
    start, end = _LEFT + max(0.0, width - spread), _LEFT + width + spread
    across = f'x1="{start:.1f}" x2="{end:.1f}" y1="{middle}" y2="{middle}"'
    milliseconds = "" if row.seconds is None else f" ({row.seconds * 1e3:.3g} ms)"
    return [
        _text(_LEFT - 8, middle + 4, name, anchor="end"),
        f'<rect {box} fill="{_COLOURS.get(row.kind, "#999")}"/>',
        f'<line {across} stroke="#333"/>',
        _text(end + 6, middle + 4, f"{ratio:.2f}{milliseconds}"),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {where}>{escape(text)}</text>"
