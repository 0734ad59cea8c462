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
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoamp.messages import log_once
from autoamp_said import logger_of

logger = logger_of(__name__)

FOLDER = "AUTOAMP_CACHE_DIR"
"""The environment variable that names another folder for measured times.

Without it they are in `autoamp` in the user's folder for caches.
"""

_MOST_BYTES = 2**25
"""The most bytes read of a file: about 13,000 lines."""

_LONGEST_LINE = 10_000
"""The most characters of a line: the times of all probes take 2,500."""


class Store:
    """What was measured under one description of the device and its libraries.

    A line of the file is `["key", value]`.  Of several values of one key the first
    counts, so that two processes that have measured at once take the same.

    Attributes:
        path: the file.
        known: key to value.
    """

    def __init__(self, description: str, is_sane: Callable[[str, Any], bool]) -> None:
        # The words are for a person who looks in the folder; the digest makes them
        # unique.
        words = re.sub(r"[^a-z0-9]+", "-", description.lower()).strip("-")[:60]
        digest = hashlib.sha256(description.encode()).hexdigest()[:12]
        named = os.environ.get(FOLDER)
        if named:
            folder = Path(named).expanduser()
        else:
            caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            folder = Path(caches) / "autoamp"
        self.path = folder / f"{words}-{digest}.jsonl"
        self._is_sane = is_sane
        self.known = self._read()

    def add(self, found: Mapping[str, Any]) -> None:
        """Stores `found`; if the disk fails, for this process only, with a warning."""
        if not found:
            return
        lines = "".join(f"{json.dumps([k, value])}\n" for k, value in found.items())
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _opened(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
                # The first newline ends a line that another process left cut off.
                os.write(file, f"\n{lines}".encode())
        except OSError as error:
            log_once(
                logger,
                logging.WARNING,
                f"autoamp: measured times cannot be stored on disk: {error}",
            )
        # The disk goes first, so that all processes price alike; without one `found`
        # stays.
        self.known = {**found, **self.known, **self._read()}

    def _read(self) -> dict[str, Any]:
        known: dict[str, Any] = {}
        try:
            with _opened(self.path, os.O_RDONLY) as file:
                parts, rest = [], _MOST_BYTES
                while rest > 0 and (part := os.read(file, min(rest, 2**20))):
                    parts.append(part)
                    rest -= len(part)
        except OSError:
            return known
        for line in b"".join(parts).decode(errors="replace").splitlines():
            if not 0 < len(line) <= _LONGEST_LINE:
                continue
            with contextlib.suppress(ValueError, RecursionError):
                match json.loads(line):
                    case [str(key), value] if self._is_sane(key, value):
                        known.setdefault(key, value)
        return known


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
