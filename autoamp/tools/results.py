"""`Result`: what `bench` and `plan` answer, as text, JSON and markdown."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from autoamp.messages import WIDTH, as_text, plain_table

SCHEMA = 1
"""The version of the JSON; raised when a field changes its meaning or is removed."""

_STYLES = {"head": "bold", "title": "bold", "failure": "red"}
_MARKDOWN = {"head": "**{}**", "title": "### {}", "note": "- {}"}


class Line(NamedTuple):
    """A sentence; `kind` is "head", "title", "failure", "note", or "" for others."""

    text: str
    kind: str = ""


class Table(NamedTuple):
    """A table of texts, of which the columns from `numbers` on are set flush right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: int = 1


@dataclass(frozen=True, repr=False)
class Result(ABC):
    """Figures that can be printed, and written as JSON or markdown."""

    @abstractmethod
    def parts(self) -> Iterator[Line | Table]:
        """The sentences and tables of `print(result)`, from the top down."""

    def document(self) -> dict[str, Any]:
        """The figures that `to_json` writes."""
        return asdict(self)

    def to_json(self) -> str:
        """All figures as JSON; `schema` is the version of its fields."""
        document = {"schema": SCHEMA, **self.document()}
        return json.dumps(_plain(document), indent=2, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """The tables as GitHub's markdown."""
        blocks: list[str] = []
        last = ""
        for part in self.parts():
            if isinstance(part, Table):
                kind, block = "", _markdown_table(part)
            elif part.text:
                kind = part.kind
                block = _MARKDOWN.get(kind, "{}").format(part.text)
            else:
                continue
            between = "\n" if kind == last == "note" else "\n\n"
            blocks += [between, block] if blocks else [block]
            last = kind
        return "".join(blocks) + "\n"

    def __str__(self) -> str:
        return as_text([*map(_rendered, self.parts())], WIDTH)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        yield from map(_rendered, self.parts())


def _rendered(part: Line | Table) -> RenderableType:
    if isinstance(part, Line):
        return Text(part.text, _STYLES.get(part.kind, ""))
    names, numbers = part.header[: part.numbers], part.header[part.numbers :]
    table = plain_table(*names, numbers=numbers)
    for row in part.rows:
        table.add_row(*map(Text, row))
    return table


def _markdown_table(table: Table) -> str:
    count = len(table.header) - table.numbers
    rule = ["---"] * table.numbers + ["---:"] * count
    lines = (table.header, rule, *table.rows)
    return "\n".join("| " + " | ".join(each) + " |" for each in lines)


def _plain(value: Any) -> Any:
    """The value with null for each number that JSON lacks: NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
