"""`Bench`: the ways to run a model, and the figures of each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from autoamp.benchmark.answer import Answer, answer
from autoamp.benchmark.record import Evidence, Measured, Row
from autoamp.benchmark.results import SCHEMA, Line, Table
from autoamp.benchmark.shown import plot, table


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

    def document(self) -> dict[str, Any]:
        """The figures that `to_json` writes."""
        return {"answer": self.answer.sentence, **super().document()}

    def parts(self) -> Iterator[Line | Table]:
        """The sentences and tables of `print(bench)`."""
        return table.parts(self)

    def to_svg(self) -> str:
        """A bar plot of the times, fp32 = 1, as SVG."""
        return plot.svg(self)

    def __repr__(self) -> str:
        return f"<autoamp.Bench of {self.label}: {len(self.rows)} rows>"


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
