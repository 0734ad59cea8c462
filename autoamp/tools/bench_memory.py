"""The memory that a step holds."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoamp import compat

MEMORY_HOW = {
    "cuda": "the most that torch's allocator held in a step, less the bytes held "
    "before the way was set up",
    "cpu": "weights, optimizer state and low copies, plus the most that torch's "
    "profiler saw allocated in a step",
}
"""How the peak memory is measured, by the type of the device."""

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")
_STDERR = 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(s in message for s in _OUT_OF_MEMORY)


class Held:
    """The memory that was held on a device when this object was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        self._cuda = self._allocated() if device.type == "cuda" else 0
        self._cpu = _living() if device.type == "cpu" else {}

    def more(self) -> int:
        """Bytes held now that were not held when this object was made."""
        gc.collect()
        if self._device.type == "cuda":
            return self._allocated() - self._cuda
        now = _living() if self._device.type == "cpu" else {}
        return sum(n for key, n in now.items() if key not in self._cpu)

    def peak(self, step: Callable[[], Any]) -> int | None:
        """The most bytes held at one time during `step()`.

        Bytes that were held when this object was made do not count.  None on a device
        on which the memory cannot be measured.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            step()
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device) - self._cuda
        if self._device.type != "cpu":
            return None
        return self.more() + max(0, *accumulate(size for _, size in allocations(step)))

    def _allocated(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)


def _living() -> dict[int, int]:
    """The memory of all tensors on the CPU: address to bytes, each storage once."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), Tensor) or isinstance(thing, compat.FakeTensor):
            continue
        if thing.device.type == "cpu" and thing.layout == torch.strided:
            address, size = compat.storage_span(thing)
            found[address] = max(size, found.get(address, 0))
    return found


def allocations(step: Callable[[], Any]) -> list[tuple[int, int]]:
    """What the CPU's allocator did during `step()`, in order: addresses and bytes.

    The bytes are negative where memory was freed.  The profiler sees no freeing of
    memory that was allocated while it was off.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Torch 2.11 warns that events of earlier cycles are lost, where there is but one.
    seen = torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    )
    with _mute():
        seen.start()
    try:
        step()
    finally:
        with _mute():
            seen.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    moves = [(e["ts"], e["args"]) for e in events if e.get("name") == "[memory]"]
    moves.sort(key=lambda pair: pair[0])
    return [(m["Addr"], m["Bytes"]) for _, m in moves if m["Device Type"] == 0]


@contextmanager
def _mute() -> Iterator[None]:
    """A region in which nothing is written to stderr, not even by compiled code.

    Torch's profiler writes two lines of its own whenever it starts and stops.
    """
    try:
        kept = os.dup(_STDERR)
    except OSError:  # the process has no stderr
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), _STDERR)
    try:
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
