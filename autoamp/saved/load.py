"""Reads a saved report from a JSON file into a `SavedReport`.

Nothing in the file is executed, and the type of every value is checked.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from autoamp.dtypes import LOW_DTYPES
from autoamp.errors import OptionError
from autoamp.printable import printable_line
from autoamp.saved.document import (
    FP32,
    SCHEMA,
    VERSION,
    SavedCast,
    SavedGraph,
    SavedOp,
    SavedReport,
)

MAX_BYTES = 1 << 28
"""The most bytes of a report that is read: about 400,000 ops."""

_PRECISIONS = (FP32, *LOW_DTYPES)
_KINDS = ("weight", "down", "up")
_GIVE = 'give a file that report.to_json("FILE") or `autoamp explain --json` wrote'

_Section = tuple[int, str]


def load(path: str | os.PathLike[str]) -> SavedReport:
    """The report that `Report.to_json(path)` wrote.

    Raises:
        OptionError: the file cannot be read or is no report; the message names the file
            and the key.

    Example:
        >>> import os, tempfile, torch, autoamp
        >>> from autoamp.saved.load import load
        >>> report = autoamp.explain(torch.nn.Linear(8, 8), torch.ones(4, 8))
        >>> path = os.path.join(tempfile.mkdtemp(), "precision.json")
        >>> _ = report.to_json(path)
        >>> load(path).model
        'Linear'
    """
    shown = printable_line(os.fsdecode(path), 300)
    try:
        text = _read(Path(path), shown)
        data = json.loads(text)
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
    return _report(shown, data)


def report_in(where: str, data: object) -> SavedReport:
    """The report in the plain values `data`, which a file of another kind holds.

    Args:
        where: the file, for messages and as the path of the report.

    Raises:
        OptionError: the values are no report; the message names the file and the key.
    """
    return _report(where, data)


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


def _report(path: str, data: object) -> SavedReport:
    if not isinstance(data, dict) or "schema" not in data:
        _fail(path, 'it has no key "schema"')
    if data["schema"] != SCHEMA:
        _fail(path, f"its schema is {_shown(data['schema'])}, not {SCHEMA!r}")
    version = _whole(path, data, "", "version")
    if version > VERSION:
        raise OptionError(
            f"{path}: its version is {_shown(version)}, and this autoamp reads "
            f"{VERSION}: a newer autoamp wrote the report; upgrade autoamp, or write "
            "the report again with this version"
        )
    sections = _sections(path, data)
    ops: dict[_Section, list[SavedOp]] = {key: [] for key in sections}
    casts: dict[_Section, list[SavedCast]] = {key: [] for key in sections}
    for where, each in _tables(path, data, "ops"):
        ops[_section_of(path, each, where, sections)].append(_op(path, each, where))
    for where, each in _tables(path, data, "casts"):
        casts[_section_of(path, each, where, sections)].append(_cast(path, each, where))
    for key, found in ops.items():
        if len({op.name for op in found}) < len(found):
            _fail(path, f"two ops of graph {key[0]} have the same name")
    dtype = data.get("compute_dtype")
    # The first documents of version 1 have no such key.
    devices = _tables(path, {"devices": [], **data}, "devices")
    return SavedReport(
        path=path,
        model=_text(path, data, "", "model"),
        compute_dtype="" if dtype is None else _text(path, data, "", "compute_dtype"),
        graphs=tuple(
            SavedGraph(*key, device, tuple(ops[key]), tuple(casts[key]))
            for key, device in sections.items()
        ),
        devices=tuple(each for _, each in devices),
    )


def _sections(path: str, data: dict[str, Any]) -> dict[_Section, str]:
    """Each graph and body to its device, in the order of the file."""
    found: dict[_Section, str] = {}
    for where, each in _tables(path, data, "graphs"):
        key = _whole(path, each, where, "graph"), _text(path, each, where, "body")
        if key in found:
            _fail(path, f"{where}: graph {key[0]} occurs twice")
        found[key] = _text(path, each, where, "device")
    return found


def _section_of(
    path: str, each: dict[str, Any], where: str, sections: dict[_Section, str]
) -> _Section:
    key = _whole(path, each, where, "graph"), _text(path, each, where, "body")
    if key not in sections:
        _fail(path, f"{where}: the report has no graph {key[0]}, body {_shown(key[1])}")
    return key


def _op(path: str, each: dict[str, Any], where: str) -> SavedOp:
    texts = ("body", "name", "op", "reason", "module", "source")
    return SavedOp(
        graph=_whole(path, each, where, "graph"),
        precision=_one_of(path, each, where, "precision", _PRECISIONS),
        **{key: _text(path, each, where, key) for key in texts},
    )


def _cast(path: str, each: dict[str, Any], where: str) -> SavedCast:
    return SavedCast(
        graph=_whole(path, each, where, "graph"),
        kind=_one_of(path, each, where, "kind", _KINDS),
        bytes=_whole(path, each, where, "bytes"),
        **{
            key: _text(path, each, where, key)
            for key in ("body", "name", "value", "dtype")
        },
    )


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


def _whole(path: str, table: dict[str, Any], where: str, key: str) -> int:
    found = table.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        _wrong(path, table, where, key, "a whole number from 0")
    return found


def _text(path: str, table: dict[str, Any], where: str, key: str) -> str:
    found = table.get(key)
    if not isinstance(found, str):
        _wrong(path, table, where, key, "a string")
    return found


def _one_of(
    path: str, table: dict[str, Any], where: str, key: str, valid: tuple[str, ...]
) -> str:
    found = _text(path, table, where, key)
    if found not in valid:
        _wrong(path, table, where, key, f"one of {', '.join(valid)}")
    return found


def _wrong(
    path: str, table: dict[str, Any], where: str, key: str, must: str
) -> NoReturn:
    place = f"{where}.{key}" if where else key
    if key not in table:
        _fail(path, f"{place} is missing; it must be {must}")
    _fail(path, f"{place} is {_shown(table[key])}; it must be {must}")


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
