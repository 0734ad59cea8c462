"""Finds every fault of a rules file, with its line; `Rules.load` stops at the first."""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoamp.errors import RulesError
from autoamp.rules.files import is_builtin
from autoamp.rules.model import Category, Rule
from autoamp.rules.parse import (
    check_table,
    check_twice,
    keep_of,
    load_toml,
    meta_of,
    rules_of,
)

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
        >>> from autoamp.rules.check import check
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
