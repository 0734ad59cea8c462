"""Writes the messages of the automatic mode to stderr if logging is not configured."""

from __future__ import annotations

import contextlib
import logging
import sys

from autoamp import compat

_PACKAGE = logging.getLogger("autoamp")


class _Fallback(logging.Handler):
    """Writes to stderr unless the script has handlers of its own at the root.

    A script that was never changed does not know our logger.  A script that sets up its
    own logging gets every line there, once.  Rank 0 writes all messages; other ranks
    write only warnings, with the number of the rank.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or sys.stderr is None:
            return
        rank = compat.own_rank()
        if rank and record.levelno < logging.WARNING:
            return
        where = f"rank {rank}: " if rank else ""
        # stderr may be closed, or be a broken pipe: no call of a model may fail because
        # of a message.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{where}{self.format(record)}\n")
            sys.stderr.flush()


_handler: list[logging.Handler] = []


def speak_up() -> None:
    """Shows messages of level INFO, unless the script has set another level."""
    if _handler:
        return
    _handler.append(_Fallback())
    _PACKAGE.addHandler(_handler[0])
    if _PACKAGE.level == logging.NOTSET:
        _PACKAGE.setLevel(logging.INFO)
        _handler[0].set_name("autoamp: level was not set")


def fall_silent() -> None:
    """Undoes `speak_up`."""
    if not _handler:
        return
    handler = _handler.pop()
    _PACKAGE.removeHandler(handler)
    if handler.get_name() and _PACKAGE.level == logging.INFO:
        _PACKAGE.setLevel(logging.NOTSET)
