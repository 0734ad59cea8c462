"""Words for users: printable names, log lines, advice, amounts, tables, bars."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch.utils.weak import WeakIdKeyDictionary

from autoamp_said import is_left_out, logger_of, was_said

# -- names that are safe to show -------------------------------------------------------


def printable(text: str, most: int = 10**6) -> str:
    """`text` in printable characters and line ends, cut in the middle beyond `most`."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    if len(shown) > most:
        shown = f"{shown[: most // 2 - 5]} ... {shown[-most // 2 :]}"
    return shown


def printable_line(text: str, most: int = 10**6) -> str:
    """`printable` on one line."""
    return printable(text.replace("\n", "\\n"), most)


def error_line(error: BaseException, most: int = 300) -> str:
    """The class and the text of an error, on one line of at most `most` characters."""
    return printable_line(f"{type(error).__name__}: {error}", most)


def class_name(of: object) -> str:
    """The name of the class of an object, for messages and reports."""
    return printable_line(type(of).__name__, 100)


# -- what is logged --------------------------------------------------------------------

_logged: dict[str, int] = {}
"""Of how many objects each text has been said."""

_said = WeakIdKeyDictionary()
"""The texts that were said of each object."""

_EACH = 4
"""For how many objects a text is logged each time."""

_LISTS = {each: f"AUTOAMP_{each.upper()}LIST_ADD" for each in ("allow", "deny")}
"""The variables that add ops to a list."""


_FLAGS = {
    "do_no_harm": "--convert-anyway",
    "allow": "--allow {}",
    "deny": "--deny {}",
    "infer": "--infer {}",
    "clear": "--clear {}",
    "keep": "--keep {}",
    "device": "--device {}",
    "precision": "--precision {}",
    "placement": "--placement {}",
    "rules": "--rules {}",
}
"""The flags of the commands that take options of `convert`."""

_ON_COMMAND_LINE = ContextVar("on the command line", default=False)


@contextlib.contextmanager
def on_command_line() -> Iterator[None]:
    """A region whose texts name the flags of a command, where it has them."""
    token = _ON_COMMAND_LINE.set(True)
    try:
        yield
    finally:
        _ON_COMMAND_LINE.reset(token)


def log_once(
    logger: logging.Logger, level: int, text: str, *, of: object = None
) -> None:
    """Logs `text` at `level`, or as DEBUG if it has been logged before.

    Args:
        of: the model, or what stands for it, that the text is about. The text is then
            logged once for each model, up to four; of a thousand models of one class,
            it is logged again only for the 8th, 16th, 32nd and so on.
    """
    again = text in (_logged if of is None else _said.get(of, ()))
    if of is not None:
        _said.setdefault(of, set()).add(text)
    count = _logged[text] = _logged.get(text, 0) + (not again)
    rare = count > _EACH and count & (count - 1)
    elsewhere = level < logging.WARNING and (is_left_out(level) or was_said(text))
    if of is not None and count > 1:
        text = f"{text} (the same holds for {count} models so far)"
    logger.log(logging.DEBUG if again or rare or elsewhere else level, "%s", text)


def log_left_to_autocast(logger: logging.Logger, label: str, *, of: object) -> None:
    """Says, once for each model, that a model's precision is the script's own choice.

    Args:
        label: the class name of the model, or the name of the function.
        of: as for `log_once`.
    """
    text = (
        f"autoamp: {label} is left to the script's own autocast, which chooses the "
        "precision of each op; switch that autocast off (bf16=False, "
        'mixed_precision="no") to let autoamp choose'
    )
    log_once(logger, logging.INFO, text, of=of)


def advice(option: str, value: object, *, by_variables: bool) -> str:
    """The text that sets an option: a keyword, or an environment variable.

    Args:
        option: an option of `convert`.
        value: the value to give; a sequence of names for lists and `keep`, a dict of
            kernels that are off for `fuse`.
        by_variables: whether environment variables gave the options, so that there may
            be no line of code that names an option.
    """
    names = [str(each) for each in value] if isinstance(value, list | tuple) else []
    listed = "[" + ", ".join(f'"{each}"' for each in names) + "]"
    if _ON_COMMAND_LINE.get():
        if option not in _FLAGS:
            return f"{option}={listed if names else repr(value)} in Python"
        return _FLAGS[option].format(",".join(names) if names else value)
    if not by_variables:
        return f"{option}={listed if names else repr(value)}"
    if isinstance(value, Mapping):
        return f"AUTOAMP_UNFUSED={','.join(value)}"
    if option in _LISTS:
        return f"{_LISTS[option]}={','.join(names)}"
    if names:
        return f"AUTOAMP_{option.upper()}={','.join(names)}"
    shown = int(value) if isinstance(value, bool) else value
    return f"AUTOAMP_{option.upper()}={shown}"


@contextlib.contextmanager
def signs_of_life(
    say: Callable[[float], None], *, every: float = 2.0
) -> Iterator[None]:
    """Calls `say` with the seconds since the start, repeatedly, while the block runs.

    Each wait is twice as long as the wait before.

    Args:
        every: seconds until the first call.
    """
    over = threading.Event()
    start = time.monotonic()

    def watch() -> None:
        wait = every
        while not over.wait(wait):
            say(time.monotonic() - start)
            wait *= 2

    thread = threading.Thread(target=watch, name="autoamp-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


# -- small pieces of text --------------------------------------------------------------

logger = logger_of(__name__)

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
        sentence = (
            f"Of this report {name} could not be made ({problem}): please report it."
        )
        log_once(logger, logging.WARNING, f"autoamp: {sentence}")
        return instead(sentence)


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


def seconds_text(seconds: float) -> str:
    """A time as text: `1.25 ms`."""
    return nanoseconds_text(seconds * 1e9)


def nanoseconds_text(nanoseconds: float) -> str:
    """A time as text: `1.25 ms`."""
    return _in_si(nanoseconds, _TIMES)


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
    harmless = re.compile(rf"{NO_FLOAT_OP}|all of its [\d,]+ float ops? stay fp32")
    return [(what, why) for what, why in skipped if not harmless.fullmatch(why)]


# -- names and places ------------------------------------------------------------------


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


# -- a bar for what takes long ---------------------------------------------------------

_T = TypeVar("_T")

QUIET = 2.0
"""Seconds before a bar is shown."""

bars: list[str] = []
"""The bars that there are now; any other sign of a command's work gives way."""


def told(items: Collection[_T], doing: str) -> Iterator[_T]:
    """Yields `items`; after `QUIET` seconds a bar shows how many are done.

    Args:
        items: may grow while they are yielded.
        doing: the words beside the bar.
    """
    start = time.monotonic()
    console = Console(stderr=True)
    silent = not console.is_terminal  # a file would get a blank line for each bar
    with Progress(
        console=console, transient=True, auto_refresh=False, disable=silent
    ) as bar:
        task = bar.add_task(doing, total=len(items), visible=False)
        shown = {"visible": True, "refresh": True}
        timer = threading.Timer(QUIET, bar.update, (task,), shown)
        timer.daemon = True
        timer.start()  # the first item alone may take minutes
        bars.append(doing)
        try:
            for item in items:
                yield item
                late = time.monotonic() - start > QUIET
                bar.update(
                    task, advance=1, total=len(items), visible=late, refresh=late
                )
        finally:
            bars.remove(doing)
            timer.cancel()
