"""Reads a rules file into rules; each fault in it is a `RulesError` that says where."""

from __future__ import annotations

import codecs
import contextlib
import math
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from autoamp import compat
from autoamp.dtypes import TORCH_NAMES
from autoamp.errors import RulesError
from autoamp.passes.ops import close_names, exists, overloads, parse_op_name
from autoamp.passes.rules.model import (
    Category,
    Condition,
    ConditionValue,
    Rule,
    is_builtin,
)
from autoamp_said import logger_of

MAX_BYTES = 1 << 20
"""Bytes of the largest rules file read; the built-in files are a tenth as large."""

MAX_DOTS = 100
"""The most dots that a line of a rules file may have."""

_INTEGER_BITS = 63

_META = {"dtype": (*TORCH_NAMES, "any"), "description": None}
_CONDITION = ("test", "value", "argument", "category", "reason")
_CATEGORIES = [c.value for c in Category]
_TABLES = ["meta", "keep", *_CATEGORIES]

_log = logger_of(__name__)


class Contents:
    """What a rules file says, read entry by entry.

    Attributes:
        dtype: the low dtype the rules were written for, or `any`.
        rules: the rules by canonical op name.
        keep: patterns of the module paths that stay fp32.
    """

    def __init__(self, path: Path, *, builtin: bool) -> None:
        self._path, self._builtin = path, builtin
        self.dtype = "any"
        self.rules: dict[str, Rule] = {}
        self.keep: tuple[str, ...] = ()

    def add(self, table: str, written: str, value: Any) -> None:
        """Takes in one entry of a table.

        Raises:
            RulesError: the entry is wrong; the error names the key, not the file.
        """
        _refuse_long_integers(f"{table}.{written}", value)
        if table == "meta":
            if written not in _META:
                _fail(f"meta.{written}", f"unknown; use {', '.join(_META)}")
            choices = _META[written]
            if not isinstance(value, str) or (choices and value not in choices):
                what = f"one of {', '.join(choices)}" if choices else "a string"
                _fail(f"meta.{written}", f"is {value!r}; must be {what}")
            if written == "dtype":
                self.dtype = value
        elif table == "keep":
            if written != "modules":
                _fail(f"keep.{written}", "unknown; use modules")
            if not isinstance(value, list) or not all(
                isinstance(m, str) for m in value
            ):
                _fail("keep.modules", f"is {value!r}; must be a list of module paths")
            self.keep = tuple(value)
        else:
            self._add_rule(Category(table), written, value)

    def _add_rule(self, category: Category, written: str, value: object) -> None:
        key, op = f"{category}.{written}", parse_op_name(written)
        if not exists(op):
            if not self._builtin:
                _fail(key, unknown_op(op))
            _log.debug("%s: %s is not in this torch; left out", self._path, op)
            return
        if isinstance(value, str):
            value = {"reason": value}
        if not isinstance(value, dict):
            _fail(key, 'must be a reason or a table such as {reason = "..."}')
        attributes = {**value, "reason": value.get("reason", "")}
        for name, given in attributes.items():
            if name not in _ATTRIBUTES:
                known = ", ".join(_ATTRIBUTES)
                _fail(f"{key}.{name}", f"unknown; use {known}, or quote the key")
            attributes[name] = _ATTRIBUTES[name](f"{key}.{name}", op, given)
        if op in self.rules:
            there = f"in [{self.rules[op].category}] and in [{category}]"
            _fail(op, f"named twice, {there}; delete one of them")
        stated = frozenset(attributes) - {"reason"}
        origin = str(self._path)
        self.rules[op] = Rule(op, category, origin=origin, stated=stated, **attributes)


def read(path: Path, *, builtin: bool) -> Contents:
    """The contents of the TOML file at `path`.

    Args:
        builtin: Whether the file came with the package. An op that this torch lacks
            is then left out, since the file serves several torch versions; in a
            user's file it is an error.
    """
    contents = Contents(path, builtin=builtin)
    try:
        data = _load_toml(_read_text(path))
        for table, entries in data.items():
            _check_table(table, entries)
        for table in sorted(data, key=_TABLES.index):
            for written, value in data[table].items():
                contents.add(table, written, value)
    except RulesError as error:
        raise RulesError(f"{path}: {error}") from error.__cause__
    return contents


def unknown_op(op: str) -> str:
    """The message for a user who named an op that this torch does not have."""
    close = close_names(op)
    hint = f"did you mean {' or '.join(close)}?" if close else "check its name"
    return f"torch has no op {op}; {hint}"


def _check_table(table: str, entries: object) -> None:
    if table not in _TABLES:
        known = ", ".join(_CATEGORIES)
        _fail(table, f"no such table; use {known}, keep or meta")
    if not isinstance(entries, dict):
        _fail(table, f"must be a table: write [{table}] on its own line")


def _load_toml(text: str) -> dict[str, Any]:
    """The tables of a rules file, not checked yet."""
    # Before `tomllib`, which a key of a million dots keeps busy for hours.  A key ends
    # with its line, so that its dots can be counted without a parser.
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MAX_DOTS:
            raise RulesError(
                f"line {number} has more than {MAX_DOTS} dots; keys of a rules "
                "file have two at most, and a reason is a sentence"
            )
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # 5000-digit integers too
        raise RulesError(f"not a TOML file: {error}") from error


def _read_text(path: Path) -> str:
    """The text of a file in UTF-8, or in UTF-16 as Windows writes it."""
    try:
        data = _read_bytes(path)
    except RulesError:
        raise
    except (OSError, ValueError) as error:  # a null byte in the path
        why = getattr(error, "strerror", error)
        raise RulesError(
            f"cannot be read ({why}); give the path of a TOML file, or the name of a "
            "built-in set"
        ) from error
    marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if marked else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise RulesError(
            f"not a TOML file: {error}; save the file as text in UTF-8"
        ) from error


def _read_bytes(path: Path) -> bytes:
    status = path.stat()
    # Reading a pipe may block for ever. A directory is refused by `read_bytes`, whose
    # error says what it is.
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise RulesError(
            "cannot be read (it is a device or a pipe, not a file); give "
            "the path of a TOML file, or the name of a built-in set"
        )
    size = status.st_size
    if size > MAX_BYTES:
        raise RulesError(
            f"{size} bytes, but a rules file has at most {MAX_BYTES}; "
            "give the path of a TOML file of op rules"
        )
    return path.read_bytes()


def _refuse_long_integers(key: str, value: object) -> None:
    """Refuses integers of more than 64 bits, which no test of a rule can use."""
    inner: Iterable[object] = ()
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        # `repr` would raise an error for thousands of digits.
        problem = f"holds a whole number of {value.bit_length()} bits"
        _fail(key, f"{problem}; TOML has {_INTEGER_BITS} and a sign")
    if isinstance(value, list):
        inner = value
    elif isinstance(value, dict):
        inner = value.values()
    for each in inner:
        _refuse_long_integers(key, each)


# -- the attributes of a rule: each takes the key, the op and what the file gives -----


def _text(key: str, _: str, given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        _fail(key, "must be a sentence, and not empty")
    return given


def _flag(key: str, _: str, given: object) -> bool:
    if not isinstance(given, bool):
        _fail(key, f"is {given!r}; must be true or false")
    return given


def _names(key: str, _: str, given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(n, str) and n for n in given):
        _fail(key, f"is {given!r}; must be a list of names")
    return tuple(given)


def _arguments(key: str, op: str, given: object) -> tuple[str, ...]:
    for name in (names := _names(key, op, given)):
        _check_argument(key, op, name)
    return names


def _check_argument(key: str, op: str, name: object) -> None:
    found = {a.name for o in overloads(op) for a in compat.schema(o).arguments}
    if name not in found:
        choices = ", ".join(sorted(found))
        _fail(key, f"{op} has no argument {name!r}; it has {choices}")


def _conditions(key: str, op: str, given: object) -> tuple[Condition, ...]:
    if not isinstance(given, list) or not all(isinstance(c, dict) for c in given):
        _fail(key, "must be a list of tables")
    return tuple(_condition(f"{key}[{i}]", op, each) for i, each in enumerate(given))


def _condition(key: str, op: str, given: dict[str, Any]) -> Condition:
    for name in given:
        if name not in _CONDITION:
            _fail(f"{key}.{name}", f"unknown; use {', '.join(_CONDITION)}")
    test, category = given.get("test"), given.get("category")
    if test not in [*_VALUES]:
        _fail(f"{key}.test", f"is {test!r}; use one of {', '.join(_VALUES)}")
    if category not in _CATEGORIES:
        choices = ", ".join(_CATEGORIES)
        _fail(f"{key}.category", f"is {category!r}; use one of {choices}")
    reason = _text(f"{key}.reason", op, given.get("reason", ""))
    argument = given.get("argument", "")
    if test == "argument_is":
        _check_argument(f"{key}.argument", op, argument)
    elif argument:
        _fail(f"{key}.argument", f"has no effect with {test}; delete it")
    value: Any = given.get("value")
    fits, what = _VALUES[test]
    if not fits(value):
        _fail(f"{key}.value", f"is {value!r}; must be {what}")
    compared: ConditionValue = value
    if isinstance(value, list):
        compared = float(value[0]), float(value[1])
    return Condition(test, compared, Category(category), reason, argument)


def _is_number(value: object) -> bool:
    # `True` is an `int` in Python.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_range(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(map(_is_number, value)) and bool(value[0] <= value[1])


_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "reduces_at_least": (
        lambda value: _is_number(value) and isinstance(value, int) and value > 0,
        "a positive whole number",
    ),
    "exponent_outside": (_is_range, "[lowest, highest]"),
    "argument_is": (
        # NaN equals no argument, not even NaN.
        lambda value: (
            isinstance(value, bool | int | float | str)
            and not (isinstance(value, float) and math.isnan(value))
        ),
        "a string, a number or a boolean",
    ),
    "device_is": (
        lambda value: isinstance(value, str) and value != "",
        'a device type such as "cuda"',
    ),
    "contracts": (lambda value: isinstance(value, bool), "true or false"),
}
"""Each test that a condition may make, what its value has to be, and that in words."""

_ATTRIBUTES: Mapping[str, Callable[[str, str, Any], Any]] = {
    "reason": _text,
    "when": _conditions,
    "restores": _flag,
    "jumps": _flag,
    "may_round": _flag,
    "fp32_operands": _arguments,
    "no_kernel": _names,
    "restores_given": _arguments,
}
"""Each attribute of a rule, and the function that checks it."""


def _fail(key: str, problem: str) -> NoReturn:
    raise RulesError(f"{key}: {problem}")


# -- every fault of a file, with its line ----------------------------------------------

_AT_LINE = re.compile(r"\(at line (\d+)|line (\d+) has")
# Near enough to find lines for messages; what a file means is left to `tomllib`.
_HEADER = re.compile(r"^\s*(\[[^\[].*?\])\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:"(?:[^"\\]|\\.)*"|'[^']*'|[\w:.\s-])+?)\s*=""")

_Place = tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """One fault of a rules file.

    Attributes:
        line: the line, from 1; 0 where it is unknown.
        problem: the key, the fault and the correction, a sentence.
    """

    line: int
    problem: str


def check(path: Path) -> tuple[list[Fault], int]:
    """Every fault of the file, in the order of its lines, and its number of rules.

    An entry with several faults counts once, with the first of them.

    Raises:
        RulesError: the file cannot be read.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from autoamp.passes.rules.parse import check
        >>> path = Path(tempfile.mkdtemp(), "my_rules.toml")
        >>> _ = path.write_text('[allow]\\nlinaer = "safe"\\n')
        >>> check(path)
        ([Fault(line=2, problem='allow.linaer: torch has no op aten::linaer; ...')], 0)
    """
    try:
        text = _read_text(path)
        data = _load_toml(text)
    except RulesError as error:
        line = _AT_LINE.search(str(error))
        if line is None:
            raise RulesError(f"{path}: {error}") from error.__cause__
        return [Fault(int(line[1] or line[2]), str(error))], 0
    places = _places(text)
    faults: list[Fault] = []

    @contextlib.contextmanager
    def at(*place: str) -> Iterator[None]:
        try:
            yield
        except RulesError as error:
            # A key that the patterns miss has the line of its table.
            line = places.get(place, places.get(place[:1], 0))
            faults.append(Fault(line, str(error)))

    # A built-in file may name ops of a newer torch.
    contents = Contents(path, builtin=is_builtin(path))
    for table, entries in data.items():
        with at(table):
            _check_table(table, entries)
            for written, value in entries.items():
                with at(table, written):
                    contents.add(table, written, value)
    return sorted(faults, key=lambda fault: fault.line), len(contents.rules)


def _places(text: str) -> dict[_Place, int]:
    """The first line of each table, and of each key in a table; for messages only."""
    found: dict[_Place, int] = {}
    table: _Place = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            whole = table = _key_of(header[1])
        elif written := _KEY.match(line):
            whole = (*table, *_key_of(f"{written[1]}=0"))
        else:
            continue
        for length in range(1, min(len(whole), 2) + 1):
            found.setdefault(whole[:length], number)
    return found


def _key_of(toml: str) -> _Place:
    """The parts of the one key that a line of TOML has, unquoted as TOML does it."""
    parts: list[str] = []
    with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):
        at: Any = tomllib.loads(toml)
        while isinstance(at, dict) and at:
            (part, at), *_ = at.items()
            parts.append(part)
    return tuple(parts)
