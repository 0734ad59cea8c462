"""Which process of a program says a line, and whether the script's logging shows it.

This module stands beside the package `autoamp` and imports nothing but Python: a
program in which no model is captured says one line, too.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
from typing import Any

PACKAGE = "autoamp"
_SAID = "autoamp said"


def say(level: int, text: str) -> None:
    """Logs a line where the program has set up logging, or writes it to stderr."""
    # Where stderr is closed, logging itself raises.
    with contextlib.suppress(OSError, ValueError):
        logger = logger_of(PACKAGE)
        is_unwanted = logger.level > level or logger.manager.disable >= level
        if level >= logging.WARNING:
            logger.log(level, "%s", text)
        elif is_unwanted or is_left_out(level):
            return
        elif is_shown(level):
            # Not `log`: the level of the root, which is WARNING, would hold it back.
            where = __file__, 0, text, (), None
            logger.handle(logger.makeRecord(logger.name, level, *where))
        else:
            to_stderr(text)


class Lines(logging.Logger):
    """A logger of ours, whose lines are shown whatever the script does with `logging`.

    Its level, and `logging.disable`, are the script's to set.

    Attributes:
        speaks: whether a line that no handler shows is written to stderr.
    """

    speaks = False

    @property
    def disabled(self) -> bool:
        """False: `logging.config` disables all loggers that it is not told of."""
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None: ...

    def callHandlers(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Hands a line to the script's handlers, or writes it if this process says it.

        This is asked of no handler of ours, which the script could take away.
        """
        if not Lines.speaks or is_shown(record.levelno):
            super().callHandlers(record)
        elif not is_left_out(record.levelno):
            to_stderr(logging.Formatter().format(record))


def logger_of(name: str) -> logging.Logger:
    """Python's logger of that name, as one of `Lines`."""
    logger = logging.getLogger(name)
    kind = type(logger)  # the script may have set a class of its own
    if not issubclass(kind, Lines):
        logger.__class__ = type(kind.__name__, (Lines, kind), {})
    return logger


def to_stderr(text: str) -> None:
    """Writes a line, which never fails: stderr may be closed, or a broken pipe."""
    rank = own_rank()
    where = f"rank {rank}: " if rank else ""
    try:
        if sys.stderr is not None:
            sys.stderr.write(f"{where}{text}\n")
            sys.stderr.flush()
    except (OSError, ValueError):
        pass


def is_shown(level: int) -> bool:
    """Whether a handler of the script's own shows the package's lines of a level."""
    logger: logging.Logger | None = logging.getLogger(PACKAGE)
    while logger is not None:
        for each in logger.handlers:
            is_none = isinstance(each, logging.NullHandler)
            if not is_none and each.level <= level:
                return True
        logger = logger.parent if logger.propagate else None
    return False


def is_left_out(level: int) -> bool:
    """Whether another process of the program says the lines of a level.

    Rank 0 does, or of a process and those that it has started with `multiprocessing`
    the process itself and the first of them.  Every process says its own warnings.
    """
    if level >= logging.WARNING:
        return False
    rank = own_rank()
    if rank is not None:
        return rank > 0
    # The number of this process among its parent's, after the parent's own numbers.
    numbers = getattr(multiprocessing.current_process(), "_identity", ())
    return any(number > 1 for number in numbers)


def was_said(text: str) -> bool:
    """Whether a process said `text` before it started this one; notes that it is said.

    A process is given a copy of the table with which its parent was configured.
    """
    config = getattr(multiprocessing.current_process(), "_config", None)
    if not isinstance(config, dict):
        return False
    lines = config.get(_SAID, frozenset())
    config[_SAID] = lines | {(os.getpid(), text)}
    return any(by != os.getpid() and each == text for by, each in lines)


def own_rank() -> int | None:
    """The number of this process among several ranks; None where it is the only one.

    torchrun tells it before the script has made a process group.
    """
    ranks: Any = sys.modules.get("torch.distributed")
    is_group = ranks and ranks.is_available() and ranks.is_initialized()
    if is_group and ranks.get_world_size() > 1:
        return int(ranks.get_rank())
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return int(os.environ.get("RANK", "0")) if several else None
