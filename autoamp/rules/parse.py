"""Reads a rules file into rules; each fault in it is a `RulesError` that says where."""

from __future__ import annotations

import contextlib
import logging
import re
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from autoamp import compat
from autoamp.dtypes import TORCH_NAMES
from autoamp.errors import RulesError
from autoamp.op_names import close_names, exists, overloads, parse_op_name
from autoamp.rules.model import (
    TESTS,
    Category,
    Condition,
    ConditionValue,
    Rule,
    is_builtin,
)

MAX_BYTES = 1 << 20
"""Bytes of the largest rules file read; the built-in files are a tenth as large."""

MAX_DOTS = 100
"""The most dots that a line of a rules file may have."""

_META = {"dtype": (*TORCH_NAMES, "any"), "description": None}
_FLAGS = ("restores", "jumps", "may_round")
_NAMES = ("fp32_operands", "no_kernel", "restores_given")
_ATTRIBUTES = ("reason", "when", *_FLAGS, *_NAMES)
_CONDITION = ("test", "value", "argument", "category", "reason")

_CATEGORIES = [c.value for c in Category]

_log = logging.getLogger(__name__)


class Contents(NamedTuple):
    """The contents of a rules file.

    Attributes:
        meta: the meta table.
        rules: the rules by canonical op name.
        keep: patterns of the module paths that stay fp32.
    """

    meta: dict[str, str]
    rules: dict[str, Rule]
    keep: tuple[str, ...]


def read(path: Path, *, builtin: bool) -> Contents:
    """The contents of the file at `path`.

    Args:
        path: The TOML file.
        builtin: Whether the file came with the package. An op that this torch lacks
            is then left out, since the file serves several torch versions; in a
            user's file it is an error.
    """
    data = load_toml(path)
    for table, entries in data.items():
        check_table(path, table, entries)
    meta = meta_of(path, data.pop("meta", {}))
    keep = keep_of(path, data.pop("keep", {}))
    rules: dict[str, Rule] = {}
    for table in sorted(data, key=_CATEGORIES.index):
        for rule in rules_of(path, Category(table), data[table], builtin=builtin):
            check_twice(path, rule, rules.get(rule.op))
            rules[rule.op] = rule
    return Contents(meta, rules, keep)


def check_table(path: Path, table: str, entries: object) -> None:
    """Raises for a table that a rules file cannot have."""
    if table not in ("meta", "keep", *_CATEGORIES):
        known = ", ".join(_CATEGORIES)
        _fail(path, table, f"no such table; use {known}, keep or meta")
    if not isinstance(entries, dict):
        _fail(path, table, f"must be a table: write [{table}] on its own line")


def check_twice(path: Path, rule: Rule, other: Rule | None) -> None:
    """Raises for a rule on an op on which the file has the rule `other`."""
    if other is not None:
        there = f"in [{other.category}] and in [{rule.category}]"
        _fail(path, rule.op, f"named twice, {there}; delete one of them")


def load_toml(path: Path) -> dict[str, Any]:
    """The tables of a rules file, not checked yet."""
    try:
        text = _read_bytes(path).decode("utf-8")
        _refuse_deep_keys(path, text)
        return tomllib.loads(text)
    except OSError as error:
        raise RulesError(
            f"{path}: cannot be read ({error.strerror}); give the path of a TOML "
            "file, or the name of a built-in set"
        ) from error
    except RulesError:
        raise
    except (ValueError, RecursionError) as error:  # 5000-digit integers too
        raise RulesError(f"{path}: not a TOML file: {error}") from error


def _read_bytes(path: Path) -> bytes:
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise RulesError(
            f"{path}: cannot be read (it is a device or a pipe, not a file); give "
            "the path of a TOML file, or the name of a built-in set"
        )
    size = status.st_size
    if size > MAX_BYTES:
        raise RulesError(
            f"{path}: {size} bytes, but a rules file has at most {MAX_BYTES}; "
            "give the path of a TOML file of op rules"
        )
    return path.read_bytes()


def _refuse_deep_keys(path: Path, text: str) -> None:
    """Refuses a file with more than `MAX_DOTS` dots on a line.

    A key of a million parts keeps `tomllib` busy for hours; keys end with their line.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MAX_DOTS:
            raise RulesError(
                f"{path}: line {number} has more than {MAX_DOTS} dots; keys of a rules "
                "file have two at most, and a reason is a sentence"
            )


def meta_of(path: Path, meta: dict[str, Any]) -> dict[str, str]:
    """The meta table, checked, with its defaults."""
    for key, value in meta.items():
        if key not in _META:
            _fail(path, f"meta.{key}", f"unknown; use {', '.join(_META)}")
        choices = _META[key]
        if not isinstance(value, str) or (choices and value not in choices):
            what = f"one of {', '.join(choices)}" if choices else "a string"
            _fail(path, f"meta.{key}", f"is {value!r}; must be {what}")
    return {"dtype": "any", "description": "", **meta}


def keep_of(path: Path, table: dict[str, Any]) -> tuple[str, ...]:
    """The patterns `modules` of table `keep`."""
    for key in table.keys() - {"modules"}:
        _fail(path, f"keep.{key}", "unknown; use modules")
    modules = table.get("modules", [])
    named = isinstance(modules, list) and all(isinstance(m, str) for m in modules)
    if not named:
        _fail(path, "keep.modules", f"is {modules!r}; must be a list of module paths")
    return tuple(modules)


def rules_of(
    path: Path, category: Category, entries: dict[str, Any], *, builtin: bool
) -> Iterator[Rule]:
    """The rules of one table; see `read` for `builtin`."""
    for written, value in entries.items():
        key = f"{category}.{written}"
        op = parse_op_name(written)
        if not exists(op):
            if builtin:
                _log.debug("%s: %s is not in this torch; left out", path, op)
                continue
            _fail(path, key, unknown_op(op))
        yield _rule(path, key, op, category, value)


def unknown_op(op: str) -> str:
    """The message for a user who named an op that this torch does not have."""
    close = close_names(op)
    hint = f"did you mean {' or '.join(close)}?" if close else "check its name"
    return f"torch has no op {op}; {hint}"


def _rule(path: Path, key: str, op: str, category: Category, value: object) -> Rule:
    if isinstance(value, str):
        value = {"reason": value}
    if not isinstance(value, dict):
        _fail(path, key, 'must be a reason or a table such as {reason = "..."}')
    attributes = {
        name: _attribute(path, f"{key}.{name}", op, name, given)
        for name, given in value.items()
    }
    _text(path, f"{key}.reason", attributes.get("reason", ""))
    for name in ("fp32_operands", "restores_given"):
        for argument in attributes.get(name, ()):
            _argument(path, f"{key}.{name}", op, argument)
    stated = frozenset(attributes) - {"reason"}
    return Rule(op, category, origin=str(path), stated=stated, **attributes)


def _attribute(path: Path, key: str, op: str, name: str, given: object) -> Any:
    if name not in _ATTRIBUTES:
        _fail(path, key, f"unknown; use {', '.join(_ATTRIBUTES)}, or quote the key")
    if name in _NAMES:
        return _names(path, key, given)
    if name == "when":
        return _conditions(path, key, op, given)
    if name in _FLAGS and not isinstance(given, bool):
        _fail(path, key, f"is {given!r}; must be true or false")
    return given if name in _FLAGS else _text(path, key, given)


def _conditions(path: Path, key: str, op: str, given: object) -> tuple[Condition, ...]:
    if not isinstance(given, list) or not all(isinstance(c, dict) for c in given):
        _fail(path, key, "must be a list of tables")
    return tuple(
        _condition(path, f"{key}[{i}]", op, each) for i, each in enumerate(given)
    )


def _condition(path: Path, key: str, op: str, given: dict[str, Any]) -> Condition:
    for name in given:
        if name not in _CONDITION:
            _fail(path, f"{key}.{name}", f"unknown; use {', '.join(_CONDITION)}")
    test, category = given.get("test"), given.get("category")
    if test not in TESTS:
        _fail(path, f"{key}.test", f"is {test!r}; use one of {', '.join(TESTS)}")
    if category not in list(Category):
        choices = ", ".join(Category)
        _fail(path, f"{key}.category", f"is {category!r}; use one of {choices}")
    reason = _text(path, f"{key}.reason", given.get("reason", ""))
    argument = given.get("argument", "")
    if test == "argument_is":
        _argument(path, f"{key}.argument", op, argument)
    elif argument:
        _fail(path, f"{key}.argument", f"has no effect with {test}; delete it")
    value = _value(path, f"{key}.value", test, given.get("value"))
    return Condition(test, value, Category(category), reason, argument)


def _value(path: Path, key: str, test: str, value: object) -> ConditionValue:
    if test == "reduces_at_least":
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        _fail(path, key, f"is {value!r}; must be a positive whole number")
    if test == "exponent_outside":
        if isinstance(value, list) and len(value) == 2 and all(map(_number, value)):
            low, high = map(float, value)
            if low <= high:
                return low, high
        _fail(path, key, f"is {value!r}; must be [lowest, highest]")
    if test == "contracts" and not isinstance(value, bool):
        _fail(path, key, f"is {value!r}; must be true or false")
    if test == "device_is" and not (isinstance(value, str) and value):
        _fail(path, key, f'is {value!r}; must be a device type such as "cuda"')
    if not isinstance(value, (bool, int, float, str)):
        _fail(path, key, f"is {value!r}; must be a string, a number or a boolean")
    return value


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _names(path: Path, key: str, given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(n, str) and n for n in given):
        _fail(path, key, f"is {given!r}; must be a list of names")
    return tuple(given)


def _text(path: Path, key: str, given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        _fail(path, key, "must be a sentence, and not empty")
    return given


def _argument(path: Path, key: str, op: str, name: object) -> None:
    found = {a.name for o in overloads(op) for a in compat.schema(o).arguments}
    if name not in found:
        choices = ", ".join(sorted(found))
        _fail(path, key, f"{op} has no argument {name!r}; it has {choices}")


def _fail(path: Path, key: str, problem: str) -> NoReturn:
    raise RulesError(f"{path}: {key}: {problem}")


_AT_LINE = re.compile(r"\(at line (\d+)|line (\d+) has")
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
        >>> from autoamp.rules.parse import check
        >>> path = Path(tempfile.mkdtemp(), "my_rules.toml")
        >>> _ = path.write_text('[allow]\\nlinaer = "safe"\\n')
        >>> check(path)
        ([Fault(line=2, problem='allow.linaer: torch has no op aten::linaer; ...')], 0)
    """
    try:
        data = load_toml(path)
    except RulesError as error:
        found = _AT_LINE.search(str(error))
        if found is None:
            raise
        return [Fault(int(found[1] or found[2]), _without(path, error))], 0
    search = _Search(path, _places(path.read_text(encoding="utf-8")))
    for table, entries in data.items():
        with search.at(table):
            check_table(path, table, entries)
            search.look(table, entries)
    return sorted(search.faults, key=lambda fault: fault.line), len(search.rules)


class _Search:
    """The faults and rules found so far."""

    def __init__(self, path: Path, places: dict[_Place, int]) -> None:
        self.path = path
        self.is_builtin = is_builtin(path)  # may name ops of a newer torch
        self.places = places
        self.faults: list[Fault] = []
        self.rules: dict[str, Rule] = {}

    @contextlib.contextmanager
    def at(self, *place: str) -> Iterator[None]:
        """Keeps the fault that the block raises, which is about `place`."""
        try:
            yield
        except RulesError as error:
            line = self.places.get(place, self.places.get(place[:1], 0))
            self.faults.append(Fault(line, _without(self.path, error)))

    def look(self, table: str, entries: dict[str, Any]) -> None:
        """Checks the entries of one table, each by itself."""
        for written, value in entries.items():
            with self.at(table, written):
                if table == "meta":
                    meta_of(self.path, {written: value})
                elif table == "keep":
                    keep_of(self.path, {written: value})
                else:
                    self._add(Category(table), {written: value})

    def _add(self, category: Category, entry: dict[str, Any]) -> None:
        for rule in rules_of(self.path, category, entry, builtin=self.is_builtin):
            check_twice(self.path, rule, self.rules.get(rule.op))
            self.rules[rule.op] = rule


def _without(path: Path, error: RulesError) -> str:
    return str(error).removeprefix(f"{path}: ")


def _places(text: str) -> dict[_Place, int]:
    """The first line of each table, and of each key in a table; for messages only."""
    found: dict[_Place, int] = {}
    table: _Place = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = next(_keys(header[1]), ())
            key: _Place = ()
        elif written := _KEY.match(line):
            key = next(_keys(f"{written[1]}=0"), ())
        else:
            continue
        whole = (*table, *key)
        for length in (1, 2):
            if len(whole) >= length:
                found.setdefault(whole[:length], number)
    return found


def _keys(toml: str) -> Iterator[_Place]:
    """The parts of the one key that a line of TOML has, unquoted as TOML does it."""
    with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):
        at: Any = tomllib.loads(toml)
        parts = []
        while isinstance(at, dict) and at:
            (part, at), *_ = at.items()
            parts.append(part)
        yield tuple(parts)
