"""A sign in the terminal that a command is at work."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

QUIET = 2.0
"""Seconds before the sign is shown."""


@contextlib.contextmanager
def waiting(doing: str) -> Iterator[None]:
    """Shows on stderr what is being done, if it takes long and stderr is a terminal.

    The sign goes while a bar of the package is shown.
    """
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    watch = threading.Thread(
        target=_show, args=(doing, over), name="autoamp-waiting", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _show(doing: str, over: threading.Event) -> None:
    begun = time.monotonic()
    if over.wait(QUIET):
        return
    from rich.console import Console

    with Console(stderr=True).status(doing) as status:
        shown = True
        while not over.wait(0.2):
            messages = sys.modules.get("autoamp.messages")
            free = not getattr(messages, "bars", None)
            if free != shown:
                shown = free
                (status.start if free else status.stop)()
            status.update(f"{doing}: {time.monotonic() - begun:.0f} s")
