"""The stack has room for a capture: no call in it maps memory."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from autoamp.compat import with_room

DEPTHS = range(20, 220)
"""Depths of calls: at one of some sixty the next call begins a new 16 KiB piece."""


def leaf(*_: int) -> None:
    pass


def crossing(depth: int) -> None:
    """Calls `leaf` a hundred times, at so deep a place."""
    if depth:
        crossing(depth - 1)
        return
    for _ in range(100):
        leaf()


def crossings() -> int:
    """Page faults of calls at every depth."""
    for depth in DEPTHS:
        crossing(depth)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for depth in DEPTHS:
        crossing(depth)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


PROGRAM = """
from autoamp import compat
from tests.runtime.test_stack import crossings
print(crossings(), compat.with_room(crossings))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted there")
def test_calls_with_room_map_no_memory() -> None:
    # In a process of its own: another thread's page faults are counted as well.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    without, within = map(int, done.stdout.split())
    assert without >= 100  # the calls at one such end
    assert within < 10


def test_what_is_called_with_room_answers_and_raises() -> None:
    assert with_room(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        with_room(divmod, 7, 0)
