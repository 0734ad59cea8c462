"""`Bench`: the ways to run a model, and the figures of each."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from autoamp.benchmark.answer import Answer, answer
from autoamp.benchmark.record import Evidence, Measured, Row
from autoamp.benchmark.shown import plot, table

SCHEMA = 1
"""The version of the JSON; raised when a field changes its meaning or is removed."""


@dataclass(frozen=True, repr=False)
class Bench(Measured):
    """The measurements of `autoamp.bench`; `print(bench)` shows them.

    The figures are the attributes of `Measured`: `bench.rows` holds one row for each
    way, fp32 first, and `bench.row("autoamp").ratio` is one figure of a row.
    """

    @property
    def answer(self) -> Answer:
        """Whether mixed precision helps, in a sentence."""
        return answer(self)

    def to_json(self) -> str:
        """All figures as JSON; `schema` is the version of its fields."""
        document = {"schema": SCHEMA, "answer": self.answer.sentence, **asdict(self)}
        return json.dumps(_plain(document), indent=2, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """The tables as GitHub's markdown."""
        return table.markdown(self)

    def to_svg(self) -> str:
        """A bar plot of the times, fp32 = 1, as SVG."""
        return plot.svg(self)

    def __str__(self) -> str:
        return table.text(self)

    def __repr__(self) -> str:
        return f"<autoamp.Bench of {self.label}: {len(self.rows)} rows>"

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        yield from table.parts(self)


def from_json(text: str) -> Bench:
    """The `Bench` that `Bench.to_json` wrote.

    Raises:
        ValueError: the text has another schema, or is no such document.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"the text is not an autoamp bench of schema {SCHEMA}")
    known = {each.name for each in fields(Bench)}
    given = {key: value for key, value in document.items() if key in known}
    rows = [{k: _tuple(v) for k, v in row.items()} for row in given.pop("rows")]
    given["notes"] = tuple(given["notes"])
    if given.get("evidence") is not None:
        given["evidence"] = Evidence(**given["evidence"])
    return Bench(rows=tuple(Row(**row) for row in rows), **given)


def _tuple(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(math.nan if each is None else each for each in value)
    return value


def _plain(value: Any) -> Any:
    """The value with null for each number that JSON lacks: NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
