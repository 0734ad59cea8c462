"""The sentences and tables of a `Bench`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autoamp.benchmark.answer import answer
from autoamp.benchmark.record import Measured, Row
from autoamp.benchmark.results import Line, Table
from autoamp.inspect.text import bytes_text, seconds_text

Cell = Callable[[Row], str]


def _time(row: Row) -> str:
    assert row.seconds is not None
    return f"{seconds_text(row.seconds)} ± {seconds_text(row.sigma or 0.0)}"


def _ratio(row: Row) -> str:
    return f"{row.ratio:.2f} ± {row.ratio_sigma:.2f}" if row.ratio is not None else ""


def _bytes(number: float | None) -> str:
    return "" if number is None else bytes_text(round(number))


def _count(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else _three(number)


def _joules(row: Row) -> str:
    if row.joules is None:
        return ""
    return ("about " if row.energy_from == "estimate" else "") + _three(row.joules)


def _grams(row: Row) -> str:
    return "" if row.co2_grams is None else _three(row.co2_grams)


def _loss(row: Row) -> str:
    return "" if row.loss is None else f"{row.loss:.5g}"


def _data(row: Row) -> str:
    if row.data_seconds is None or not row.seconds:
        return ""
    return f"{row.data_seconds / row.seconds:.0%}"


TIMES: dict[str, Cell] = {
    "time a step": _time,
    "of fp32": _ratio,
    "samples/s": lambda row: _count(row.samples),
    "tokens/s": lambda row: _count(row.tokens),
    "data": _data,
}
COSTS: dict[str, Cell] = {
    "peak": lambda row: _bytes(row.peak),
    "saved": lambda row: _bytes(row.saved),
    "moved": lambda row: _bytes(row.moved),
    "casts": lambda row: "" if row.casts is None else f"{row.casts:,}",
    "loss": _loss,
}
OTHERS: dict[str, Cell] = {
    "first step": lambda row: (
        "" if row.first_call is None else seconds_text(row.first_call)
    ),
    "J a step": _joules,
    "g CO2 of 1,000": _grams,
    "max batch": lambda row: (
        "" if row.largest_batch is None else f"{row.largest_batch:,}"
    ),
}
TABLES = (TIMES, COSTS, OTHERS)
"""Three tables, because one would be wider than a terminal."""


def parts(bench: Measured) -> Iterator[Line | Table]:
    """The parts of `print(bench)`: the answer, the tables, and the small print."""
    yield Line(f"autoamp bench: {_headline(bench)}", "head")
    sentence = answer(bench).sentence
    yield Line(f"{sentence[0].upper()}{sentence[1:]}.")
    yield Line("")
    for title, rows in _groups(bench):
        if title:
            yield Line(title, "title")
        for cells in TABLES:
            table = _table(rows, cells)
            if table is not None:
                yield table
                yield Line("")
        for row in rows:
            if row.error:
                yield Line(f"{row.way} failed: {row.error}", "failure")
    for line in _small_print(bench):
        yield Line(line, "note")


def _headline(bench: Measured) -> str:
    return f"{bench.label}, {bench.work}, {bench.precision}, on {bench.device}"


def _groups(bench: Measured) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each batch size, with a title if there are several sizes."""
    for batch in bench.batches:
        title = f"batch {batch}" if len(bench.batches) > 1 else ""
        yield title, [row for row in bench.rows if row.batch == batch]


def _table(rows: Sequence[Row], cells: dict[str, Cell]) -> Table | None:
    """A table of the ways that ran, without empty columns."""
    ran = [row for row in rows if row.seconds is not None]
    columns = {
        name: found
        for name, cell in cells.items()
        if any(found := [cell(row) for row in ran])
    }
    if not columns:
        return None
    lines = [
        [row.way, *(column[place] for column in columns.values())]
        for place, row in enumerate(ran)
    ]
    return Table(["way", *columns], lines)


def _small_print(bench: Measured) -> Iterator[str]:
    turn = "in turn" if bench.interleaved else "one way after the other"
    yield f"Times: medians of {bench.rounds} steps ± their standard deviation, {turn}."
    if bench.loss_from:
        steps = max((len(row.losses) for row in bench.rows), default=0)
        yield f"Loss: {bench.loss_from}, at step {steps}, from equal weights and data."
    if any(row.peak is not None for row in bench.rows):
        yield f"Peak memory: {bench.memory_how}."
    yield f"Energy: {bench.energy_how}."
    for note in bench.notes:
        yield f"{note}."
    yield f"{bench.measured_seconds:.0f} s in all, torch {bench.torch}."


def _three(value: float) -> str:
    """Three digits, or all digits before the point: 0.0123, 26.3, 2,630."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
