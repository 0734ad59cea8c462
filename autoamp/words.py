"""Small pieces of text: counts, amounts, places in source, names of modules, tables."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from autoamp.messages import log_once
from autoamp.passes.decide.cost import UNIT_NS
from autoamp.printable import printable

logger = logging.getLogger(__name__)

WIDTH = 80
"""Columns of the summary where no terminal says how wide it is."""

FULL_WIDTH = 100
"""Columns of lists with source lines."""

CANNOT_PAY = "cannot pay here"
"""Part of the reason why a model stays in fp32 on a device without fast units."""

NO_FLOAT_OP = "it has no float op"

CAUGHT: tuple[type[Exception], ...] = (Exception,)
"""The errors that cost a part of a report; the tests let them through."""

_SITE = re.compile(r"^.*?[/\\](?:site|dist)-packages[/\\]")
_PLACE = re.compile(r"^(?P<path>.+?)(?P<line>:\d+: )")
_FILE = re.compile(
    r"(?<![\w.])(?:[A-Za-z]:)?[/\\][^\s:'\"<>|*?]*[/\\][^\s:'\"<>|*?,)]+"
)
_FLEETING = re.compile(r" (?:at|to) 0x[0-9a-fA-F]+|(?<=<eval_with_key>)\.\d+")

Part = TypeVar("Part")


# -- a part that fails costs itself, and never the report ------------------------------


def attempt(
    name: str, make: Callable[[], Part], instead: Callable[[str], Part]
) -> Part:
    """The part `make()`, or the part that stands `instead` of it, from a sentence.

    Args:
        name: the part's name in that sentence, which is logged as well.
    """
    try:
        return make()
    except CAUGHT as error:
        problem = printable(f"{type(error).__name__}: {error}")
        said = f"Of this report {name} could not be made ({problem}): please report it."
        log_once(logger, logging.WARNING, f"autoamp: {said}")
        return instead(said)


def lines(
    name: str, make: Callable[[], Iterable[RenderableType]]
) -> Iterator[RenderableType]:
    """The same for a part of a text."""

    def instead(said: str) -> list[RenderableType]:
        return [Text(said)]

    yield from attempt(name, lambda: list(make()), instead)


# -- counts and amounts ----------------------------------------------------------------


def counted(count: int, noun: str) -> str:
    """`1 graph`, `2 graphs`, `1,024 ops`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def amount(units: int, in_bytes: bool, *, signed: bool = False) -> str:
    """Prices as text: `1.25 ms`, `+310 ns`, `4.1 kB`."""
    sign = "-" if units < 0 else "+" if signed else ""
    size = abs(units)
    text = bytes_text(size) if in_bytes else _in_si(size * UNIT_NS, _TIMES)
    return f"{sign}{text}"


def seconds_text(seconds: float) -> str:
    """A time as text: `1.25 ms`."""
    return _in_si(seconds * 1e9, _TIMES)


def bytes_text(count: int) -> str:
    """A number of bytes as text: `4.1 kB`."""
    return _in_si(count, ("B", "kB", "MB", "GB"))


_TIMES = ("ns", "µs", "ms", "s")


def _in_si(value: float, names: tuple[str, ...]) -> str:
    """`value` with three figures and the unit of `names` that fits its size."""
    step = 0
    while value >= 999.5 and step < len(names) - 1:
        value, step = value / 1000, step + 1
    digits = 0 if step == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {names[step]}"


# -- why graphs and parts were left alone ----------------------------------------------


def all_high(float_ops: int) -> str:
    """Why a graph was not changed: all of its ops, which the report lists, are fp32."""
    return f"all of its {counted(float_ops, 'float op')} stay fp32"


def not_captured(skipped: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The skipped parts whose ops are not in `Report.ops`."""
    told = re.compile(rf"{NO_FLOAT_OP}|all of its [\d,]+ float ops? stay fp32")
    return [(what, why) for what, why in skipped if not told.fullmatch(why)]


# -- names and places ------------------------------------------------------------------


def brief(reason: str, room: int) -> str:
    """The first clauses of `reason` that fit in `room` characters, else its words."""
    if len(reason) <= room:
        return reason
    ends = [m.start() for m in re.finditer(r"[;:,] ", reason) if m.start() <= room]
    if ends and ends[-1] >= room // 2:
        return reason[: ends[-1]]
    return reason[: room - 1].rpartition(" ")[0] + "…"


def shorten(source: str) -> str:
    """`source` with its path relative to `site-packages` or the working directory."""
    shorter = _SITE.sub("", source)
    return shorter.removeprefix(os.getcwd() + os.sep)


def portable(text: str) -> str:
    """`text` as it reads on every machine and in every process.

    A path to a file becomes relative to `site-packages`, or else to the folder that
    holds the outermost package of the file.  Memory addresses, and the numbers that FX
    gives to generated code, are left out.
    """
    return _FILE.sub(lambda found: _in_package(found[0]), _FLEETING.sub("", text))


def portable_place(source: str) -> str:
    """`file:line: code` with its path as in `portable`, and its code as it is."""
    place = _PLACE.match(source)
    if place is None:
        return portable(source)
    path = _FLEETING.sub("", _in_package(place["path"]))
    return f"{path}{place['line']}{source[place.end() :]}"


@cache
def _in_package(path: str) -> str:
    """`package/module.py` for the path of a file of a package, else the file's name."""
    shorter = _SITE.sub("", path)
    if shorter != path or path.startswith("<"):
        return shorter.replace("\\", "/")
    parts = Path(path).absolute().parts
    first = len(parts) - 1
    while first > 1 and Path(*parts[:first], "__init__.py").is_file():
        first -= 1
    return "/".join(parts[first:])


def op_title(op: str) -> str:
    """The short name of an op: `add` for `aten::add.Tensor`."""
    return op.removeprefix("aten::").partition(".")[0]


def one_name(paths: Sequence[str]) -> str:
    """One pattern for several module paths: `h.*.attn` for `h.0.attn`, `h.1.attn`."""
    distinct = list(dict.fromkeys(paths))
    if len(distinct) == 1:
        return distinct[0]
    patterns = {re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", p) for p in distinct}
    if len(patterns) == 1:
        return patterns.pop()
    return f"{distinct[0]} and {len(distinct) - 1} more"


# -- what a terminal shows -------------------------------------------------------------


def plain_table(first: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    """A table without a frame; the columns `numbers` are set flush right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in (first, *columns):
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, no_wrap=True, justify="right")
    return table


def as_text(parts: Sequence[RenderableType], width: int = FULL_WIDTH) -> str:
    """The parts as plain text, `width` columns wide."""
    file = io.StringIO()
    console = plain_console(file, width, color_system=None)
    for part in parts:
        console.print(part)
    lines = (line.rstrip() for line in file.getvalue().splitlines())
    return "\n".join(lines).rstrip()


def plain_console(file: io.StringIO, width: int, **options: Any) -> Console:
    """A console that writes to `file` and asks no terminal anything."""
    return Console(
        file=file,
        width=width,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        **options,
    )
