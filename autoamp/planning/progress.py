"""Lines on stderr that say what a long plan is doing."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

QUIET = 2.0
"""Seconds after which lines are shown."""


@contextlib.contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Yields a function that says what is being done; quick work prints nothing."""
    doing, late = "", False

    def say() -> None:
        sys.stderr.write(f"autoamp plan: {doing} ...\n")
        sys.stderr.flush()

    def tell(what: str) -> None:
        nonlocal doing
        doing = what
        if late:
            say()

    def begin() -> None:
        nonlocal late
        late = True
        say()

    timer = threading.Timer(QUIET, begin)
    timer.daemon = True
    timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
