"""Knows whether this thread is in a call of a converted model, or a disabled region."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _ThisThread(threading.local):
    """`off`: depth of `disabled()` regions; `inside`: depth of converted calls."""

    off = 0
    inside = 0


THREAD = _ThisThread()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """A region in which converted models called from this thread run in fp32."""
    THREAD.off += 1
    try:
        yield
    finally:
        THREAD.off -= 1


def inside_a_call() -> bool:
    """Whether this thread is in a call of a converted model."""
    return THREAD.inside > 0
