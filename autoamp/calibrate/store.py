"""Keeps measured times on disk, for the next process.

A file holds lines of JSON.  Lines are only appended, each batch in one write, so that
two processes that write at once lose nothing.  A reader skips every line that it cannot
parse, such as a line that was cut off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autoamp.messages import log_once

logger = logging.getLogger(__name__)

FOLDER = "AUTOAMP_CACHE_DIR"
"""The environment variable that names another folder for measured times."""

_MOST_BYTES = 2**25
"""The most bytes read of a file: about 300,000 times."""

_LONGEST = 200
"""The most characters of a key."""

_MOST_NS = 1e12
"""Longer times (a quarter of an hour) are taken for damaged lines."""


def folder() -> Path:
    """`AUTOAMP_CACHE_DIR`, or `autoamp` in the user's folder for caches."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "autoamp"


def path_for(description: str) -> Path:
    """The file for the times of a device and its libraries, by a description."""
    words = re.sub(r"[^a-z0-9]+", "-", description.lower()).strip("-")[:60]
    digest = hashlib.sha256(description.encode()).hexdigest()[:12]
    return folder() / f"{words}-{digest}.jsonl"


def append(path: Path, lines: str) -> None:
    """Appends whole lines; if the disk fails, a warning says so."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
            # The first newline ends a line that another process left cut off.
            os.write(file, f"\n{lines}".encode())
    except OSError as error:
        log_once(
            logger,
            logging.WARNING,
            f"autoamp: measured times cannot be stored on disk: {error}",
        )


def lines_of(path: Path, longest: int) -> Iterator[Any]:
    """The values in a file's lines; none where there is no file.

    Args:
        longest: the most characters of a line that is read.
    """
    try:
        with _opened(path, os.O_RDONLY) as file:
            content = _content(file)
    except OSError:
        return
    for line in content.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            if 0 < len(line) <= longest:
                yield json.loads(line)


class Store:
    """The times measured under one description of the device and its libraries.

    A line of the file is `["key", nanoseconds]`.

    Attributes:
        path: the file.
        known: key to nanoseconds.
    """

    def __init__(self, description: str) -> None:
        self.path = path_for(description)
        self.known = _read(self.path)

    def add(self, times: Mapping[str, float]) -> None:
        """Stores `times`, in nanoseconds; if the disk fails, for this process only."""
        self.known.update(times)
        if times:
            lines = (f"{json.dumps([k, ns])}\n" for k, ns in times.items())
            append(self.path, "".join(lines))


def _read(path: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in lines_of(path, 2 * _LONGEST):
        match line:
            case [str(key), int() | float() as ns] if _is_sane(key, ns):
                found[key] = float(ns)
    return found


def _is_sane(key: str, nanoseconds: float) -> bool:
    if isinstance(nanoseconds, bool) or len(key) > _LONGEST:
        return False
    return 0 < nanoseconds < _MOST_NS and math.isfinite(nanoseconds)


def _content(file: int) -> bytes:
    parts, left = [], _MOST_BYTES
    while left > 0 and (part := os.read(file, min(left, 2**20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


@contextlib.contextmanager
def _opened(path: Path, flags: int):  # type: ignore[no-untyped-def]
    """The descriptor of a regular file; raises for a pipe, which might block."""
    nonblocking = getattr(os, "O_NONBLOCK", 0)
    file = os.open(path, flags | nonblocking, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path} is not a regular file")
        yield file
    finally:
        os.close(file)
