"""A progress bar on stderr for work that takes more than two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

_T = TypeVar("_T")

QUIET = 2.0
"""Seconds before a bar is shown."""


def told(items: Collection[_T], doing: str) -> Iterator[_T]:
    """Yields `items`; after `QUIET` seconds a bar shows how many are done.

    Args:
        items: may grow while they are yielded.
        doing: the words beside the bar.
    """
    start = time.monotonic()
    console = Console(stderr=True)
    silent = not console.is_terminal  # a file would get a blank line for each bar
    with Progress(
        console=console, transient=True, auto_refresh=False, disable=silent
    ) as bar:
        task = bar.add_task(doing, total=len(items), visible=False)
        shown = {"visible": True, "refresh": True}
        timer = threading.Timer(QUIET, bar.update, (task,), shown)
        timer.daemon = True
        timer.start()  # the first item alone may take minutes
        try:
            for item in items:
                yield item
                late = time.monotonic() - start > QUIET
                bar.update(
                    task, advance=1, total=len(items), visible=late, refresh=late
                )
        finally:
            timer.cancel()
