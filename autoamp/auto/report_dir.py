"""Writes captured graphs, before and after the pass, and reports: `AUTOAMP_REPORT_DIR`.

Graphs and reports are written at each capture, so that they exist even if the process
is killed.  A report is written once more, with the final counts, when its model is
freed or the process ends.  Each model of each process has its own directory.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import socket
import tempfile
import threading
import weakref
from pathlib import Path

from autoamp.files import write_whole
from autoamp.reports.reporting import report_of
from autoamp.runtime.conversion_record import Record
from autoamp.runtime.engine import Engine
from autoamp_said import logger_of, own_rank

logger = logger_of(__name__)

_number = itertools.count()


class Recorder:
    """Writes the graphs and reports of conversions below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folders: weakref.WeakKeyDictionary[Record, Path] = (
            weakref.WeakKeyDictionary()
        )
        self._written: weakref.WeakKeyDictionary[Record, int] = (
            weakref.WeakKeyDictionary()
        )
        self._pid = os.getpid()
        self._lock = threading.RLock()
        atexit.register(self._at_exit)

    def write(self, engine: Engine) -> None:
        """Writes new graphs, and the report again; never raises."""
        if os.getpid() != self._pid:  # a forked process has folders of its own
            self._pid = os.getpid()
            self._lock = threading.RLock()  # another thread may have held the old one
            self._folders.clear()
            self._written.clear()
        if engine.record not in self._folders:
            # The record keeps no model alive; this call keeps the record until then.
            last = weakref.finalize(engine, self._write_freed, engine.record)
            last.atexit = False  # `_at_exit` writes then
        self._write_safely(engine.record)

    def _write_freed(self, record: Record) -> None:
        """Writes the last report of a model that was freed."""
        if record in self._folders and os.getpid() == self._pid:
            self._write_safely(record)

    def _write_safely(self, record: Record) -> None:
        try:
            with self._lock:
                self._write(record)
        except Exception as error:  # noqa: BLE001 (a full disk is no reason to fail)
            logger.warning(
                "autoamp: the report of %s could not be written to %s: %s",
                record.label,
                self.root,
                error,
            )

    def _write(self, record: Record) -> None:
        folder = self._folder(record)
        first = self._written.get(record, 0)
        for number, captured in enumerate(record.graphs[first:], first):
            after = captured.gm.print_readable(print_output=False)
            before = after
            if captured.rewritten is not None:
                before = captured.rewritten.before.print_readable(print_output=False)
            write_whole(folder / f"graph-{number}-before.py", _named(before))
            write_whole(folder / f"graph-{number}-after.py", _named(after))
            self._written[record] = number + 1
        report = report_of(record)
        write_whole(folder / "report.json", report.to_json())
        write_whole(folder / "report.txt", f"{report}\n\n{report.full()}\n")

    def finish(self) -> None:
        """Writes the reports for the last time, now and not at exit."""
        atexit.unregister(self._at_exit)
        self._at_exit()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:  # forked: the parent writes these
            return
        for record in list(self._folders):
            self._write_safely(record)
        self._folders.clear()

    def _folder(self, record: Record) -> Path:
        if record not in self._folders:
            # Names of classes may hold anything.
            name = re.sub(r"[^A-Za-z0-9_]", "_", record.label)[:60]
            host = re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname())[:40]
            rank = own_rank()
            ranked = name if rank is None else f"{name}-rank{rank}"
            folder = _new_folder(self.root, f"{ranked}-{host}-{self._pid}")
            self._folders[record] = folder
        return self._folders[record]


def _named(code: str) -> str:
    """`code` as valid Python: Dynamo calls the class of a graph `<lambda>`."""
    return code.replace("class <lambda>(", "class Graph(", 1)


def _new_folder(root: Path, name: str) -> Path:
    """Creates a folder that no other run uses."""
    root.mkdir(parents=True, exist_ok=True)
    while True:
        # In a container every run may have the same host name and process id.
        with contextlib.suppress(FileExistsError):
            folder = root / f"{name}-{next(_number)}"
            folder.mkdir()
            return folder


def written_to(value: str) -> Path:
    """The report directory `value`, created if it is missing.

    Raises:
        OSError, RuntimeError, ValueError: the directory cannot be written to.
    """
    path = Path(value).expanduser()  # a RuntimeError where there is no such home
    path.mkdir(parents=True, exist_ok=True)
    # Permission bits are not enough: they let root write everywhere, even in /proc.
    with tempfile.TemporaryFile(dir=path):
        return path.resolve()
