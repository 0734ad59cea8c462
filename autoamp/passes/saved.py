"""Reads a saved report from a JSON file into a `SavedReport`.

Nothing in the file is executed, and the type of every value is checked.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from autoamp.dtypes import LOW_DTYPES
from autoamp.errors import OptionError
from autoamp.messages import printable_line
from autoamp.passes.op_rows import (
    FP32,
    SCHEMA,
    VERSION,
    CastRow,
    OpRow,
    SavedGraph,
    SavedReport,
)

MAX_BYTES = 1 << 28
"""The most bytes of a report that is read: about 400,000 ops."""

_GIVE = 'give a file that report.to_json("FILE") or `autoamp explain --json` wrote'


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_Kind = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words and as a test."""

_WHOLE: _Kind = "a whole number from 0", _is_whole
_TEXT: _Kind = "a string", lambda value: isinstance(value, str)
_TEXT_OR_NULL: _Kind = "a string", lambda value: value is None or isinstance(value, str)


def _one_of(*valid: str) -> _Kind:
    return f"one of {', '.join(valid)}", lambda value: value in valid


_SECTION = {"graph": _WHOLE, "body": _TEXT}
_GRAPH = {**_SECTION, "device": _TEXT}
OP_KEYS: Mapping[str, _Kind] = {
    **_SECTION,
    "name": _TEXT,
    "op": _TEXT,
    "precision": _one_of(FP32, *LOW_DTYPES),
    "reason": _TEXT,
    "module": _TEXT,
    "source": _TEXT,
}
"""The keys of an op that are read from a file."""

CAST_KEYS: Mapping[str, _Kind] = {
    **_SECTION,
    "name": _TEXT,
    "value": _TEXT,
    "kind": _one_of("weight", "down", "up"),
    "dtype": _TEXT,
    "bytes": _WHOLE,
}
"""The keys of a cast that are read from a file."""


def load(path: str | os.PathLike[str]) -> SavedReport:
    """The report that `Report.to_json(path)` wrote.

    Raises:
        OptionError: the file cannot be read or is no report; the message names the file
            and the key.

    Example:
        >>> import os, tempfile, torch, autoamp
        >>> from autoamp.passes.saved import load
        >>> report = autoamp.explain(torch.nn.Linear(8, 8), torch.ones(4, 8))
        >>> path = os.path.join(tempfile.mkdtemp(), "precision.json")
        >>> _ = report.to_json(path)
        >>> load(path).model
        'Linear'
    """
    shown = printable_line(os.fsdecode(path), 300)
    try:
        data = json.loads(_read(Path(path), shown))
    except OSError as error:
        raise OptionError(
            f"{shown}: cannot be read ({error.strerror}); {_GIVE}"
        ) from None
    except OptionError:  # `OptionError` is a `ValueError` too
        raise
    except RecursionError:
        _fail(shown, "it is nested too deeply to be a report")
    except ValueError as error:  # no UTF-8, no JSON, a null byte in the path
        _fail(shown, f"it is not JSON ({error})")
    return report_in(shown, data)


def report_in(where: str, data: object) -> SavedReport:
    """The report in the plain values `data`, which a file of another kind may hold.

    Args:
        where: the file, for messages and as the path of the report.

    Raises:
        OptionError: the values are no report; the message names the file and the key.
    """
    if not isinstance(data, dict) or "schema" not in data:
        _fail(where, 'it has no key "schema"')
    if data["schema"] != SCHEMA:
        _fail(where, f"its schema is {_shown(data['schema'])}, not {SCHEMA!r}")
    (version,) = _values(where, data, "", {"version": _WHOLE})
    if version > VERSION:
        raise OptionError(
            f"{where}: its version is {_shown(version)}, and this autoamp reads "
            f"{VERSION}: a newer autoamp wrote the report; upgrade autoamp, or write "
            "the report again with this version"
        )
    sections: dict[tuple[int, str], tuple[str, list[OpRow], list[CastRow]]] = {}
    for place, each in _tables(where, data, "graphs"):
        graph, body, device = _values(where, each, place, _GRAPH)
        if (graph, body) in sections:
            _fail(where, f"{place}: graph {graph} occurs twice")
        sections[graph, body] = device, [], []
    for key, kinds in (("ops", OP_KEYS), ("casts", CAST_KEYS)):
        for place, each in _tables(where, data, key):
            values = _values(where, each, place, kinds)
            graph, body = values[:2]
            if (graph, body) not in sections:
                none = f"the report has no graph {graph}, body {_shown(body)}"
                _fail(where, f"{place}: {none}")
            _, ops, casts = sections[graph, body]
            if key == "ops":
                ops.append(OpRow(*values))
            else:
                casts.append(CastRow(*values))
    for (graph, _), (_, ops, _) in sections.items():
        if len({op.name for op in ops}) < len(ops):
            _fail(where, f"two ops of graph {graph} have the same name")
    top = {"model": _TEXT, "compute_dtype": _TEXT_OR_NULL}
    model, dtype = _values(where, {"compute_dtype": None, **data}, "", top)
    # The first documents of version 1 have no devices.
    devices = _tables(where, {"devices": [], **data}, "devices")
    return SavedReport(
        path=where,
        model=model,
        compute_dtype=dtype or "",
        graphs=tuple(
            SavedGraph(*key, device, tuple(ops), tuple(casts))
            for key, (device, ops, casts) in sections.items()
        ),
        devices=tuple(each for _, each in devices),
    )


def _read(path: Path, shown: str) -> str:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise OptionError(f"{shown}: it is a directory; {_GIVE}")
    if not stat.S_ISREG(status.st_mode):
        raise OptionError(f"{shown}: it is a device or a pipe, not a file; {_GIVE}")
    if status.st_size > MAX_BYTES:
        raise OptionError(
            f"{shown}: {status.st_size:,} bytes, but a report has at most "
            f"{MAX_BYTES:,}; {_GIVE}"
        )
    return path.read_bytes().decode("utf-8")


def _tables(
    path: str, data: dict[str, Any], key: str
) -> list[tuple[str, dict[str, Any]]]:
    found = data.get(key)
    if not isinstance(found, list):
        _fail(path, f"{key} is {_shown(found)}; it must be a list")
    tables = [(f"{key}[{index}]", each) for index, each in enumerate(found)]
    for where, each in tables:
        if not isinstance(each, dict):
            _fail(path, f"{where} is {_shown(each)}; it must be an object")
    return tables


def _values(
    path: str, table: dict[str, Any], where: str, kinds: Mapping[str, _Kind]
) -> list[Any]:
    """The values of a table by the keys of `kinds`, in their order, all checked."""
    for key, (must, is_right) in kinds.items():
        place = f"{where}.{key}" if where else key
        if key not in table:
            _fail(path, f"{place} is missing; it must be {must}")
        if not is_right(table[key]):
            _fail(path, f"{place} is {_shown(table[key])}; it must be {must}")
    return [table[key] for key in kinds]


def _shown(value: object) -> str:
    """A value of the file for a message: a list may be a million entries long."""
    if isinstance(value, list | dict):
        return "an object" if isinstance(value, dict) else "a list"
    try:
        return printable_line(repr(value), 80)
    except ValueError:  # a number of 5000 digits
        return "a huge number"


def _fail(path: str, problem: str) -> NoReturn:
    raise OptionError(f"{path}: no report of autoamp: {problem}; {_GIVE}")
