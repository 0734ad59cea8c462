"""`Printed`: an answer as sentences and tables, shown as text, markdown and HTML."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from html import escape
from typing import ClassVar, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from autoamp.messages import WIDTH, as_text, plain_table

_STYLES = {"head": "bold", "title": "bold", "failure": "red"}
_MARKDOWN = {"head": "**{}**", "title": "### {}", "note": "- {}"}


class Line(NamedTuple):
    """A sentence; `kind` is "head", "title", "failure", "note", or "" for others."""

    text: str
    kind: str = ""


class Table(NamedTuple):
    """A table of texts, of which the columns from `numbers` on are set flush right.

    A header of empty texts is not shown.  A table with a `title` is one of many long
    tables: HTML shows its title, and its rows after a click.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: int = 1
    title: str = ""


class Printed(ABC):
    """An answer whose text, markdown and HTML are made of one list of parts.

    Example:
        >>> import autoamp, torch
        >>> rules = autoamp.Rules.default("bf16")
        >>> rules._repr_html_().count("<details")
        4
    """

    columns: ClassVar[int] = WIDTH
    """The width of the text where no terminal says how wide it is."""

    @abstractmethod
    def parts(self) -> Iterator[Line | Table]:
        """The sentences and tables, from the top down."""

    def to_markdown(self) -> str:
        """The sentences and tables as GitHub's markdown."""
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
        return as_text([*_rendered(self.parts())], self.columns)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        yield from _rendered(self.parts())

    def _repr_html_(self) -> str:
        """The sentences and tables for a notebook."""
        return f"<div{_PAGE}>{''.join(map(_html, self.parts()))}</div>"


# -- text ------------------------------------------------------------------------------


def _rendered(parts: Iterator[Line | Table]) -> Iterator[RenderableType]:
    for part in parts:
        if isinstance(part, Line):
            yield Text(part.text, _STYLES.get(part.kind, ""))
            continue
        if part.title:
            yield Text(f"\n{part.title}", _STYLES["title"])
        names, numbers = part.header[: part.numbers], part.header[part.numbers :]
        table = plain_table(*names, numbers=numbers)
        table.show_header = any(part.header)
        for column in table.columns[: part.numbers]:
            column.no_wrap = (
                False  # a name continues on the next line; figures are whole
            )
            column.overflow = "fold"
        for row in part.rows:
            table.add_row(*map(Text, row))
        yield table


# -- markdown --------------------------------------------------------------------------


def _markdown_table(table: Table) -> str:
    count = len(table.header) - table.numbers
    rule = ["---"] * table.numbers + ["---:"] * count
    lines = (table.header, rule, *table.rows)
    title = f"### {table.title}\n\n" if table.title else ""
    return title + "\n".join("| " + " | ".join(each) + " |" for each in lines)


# -- HTML ------------------------------------------------------------------------------

# Notebooks strip or share style sheets, so that each element carries its own style.
# There is no colour of ours but for failures: pages are light or dark.
_PAGE = ' style="font-family:system-ui,sans-serif;line-height:1.45;max-width:60em"'
_LINES = {
    "head": "font-weight:600;font-size:1.1em",
    "title": "font-weight:600;margin-top:0.8em",
    "failure": "color:#d33",
    "note": "opacity:0.75;font-size:0.9em",
}
_WIDE = ' style="overflow-x:auto;margin:0.4em 0"'
_TABLE = ' style="border-collapse:collapse;margin:0;font-variant-numeric:tabular-nums"'
_CELL = "padding:0.15em 0.8em 0.15em 0;vertical-align:top"
_WHOLE = 30
"""The most characters of a cell that is never broken."""
_RULE = ";border-bottom:1px solid rgba(128,128,128,0.6);font-weight:600"


def _html(part: Line | Table) -> str:
    if isinstance(part, Line):
        if not part.text.strip():
            return ""
        style = f' style="{_LINES[part.kind]}"' if part.kind in _LINES else ""
        return f"<div{style}>{escape(part.text.strip())}</div>"
    rows = "".join(_html_row("td", row, part.numbers) for row in part.rows)
    head = _html_row("th", part.header, part.numbers) if any(part.header) else ""
    thead = f"<thead>{head}</thead>" if head else ""
    found = f"<table{_TABLE}>{thead}<tbody>{rows}</tbody></table>"
    found = f"<div{_WIDE}>{found}</div>"
    if not part.title:
        return found
    title = f'<summary style="cursor:pointer">{escape(part.title)}</summary>'
    return f"<details>{title}{found}</details>"


def _html_row(tag: str, cells: Sequence[str], numbers: int) -> str:
    found = []
    for column, text in enumerate(cells):
        side = "right" if column >= numbers else "left"
        space = "pre-wrap" if len(text) > _WHOLE else "pre"
        style = f"text-align:{side};white-space:{space};{_CELL}"
        style += _RULE if tag == "th" else ""
        found.append(f'<{tag} style="{style}">{escape(text)}</{tag}>')
    return f"<tr>{''.join(found)}</tr>"
