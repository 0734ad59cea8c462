"""The largest batch that a way runs within a budget of memory."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from autoamp.benchmark import memory
from autoamp.benchmark.step.batch import resized
from autoamp.benchmark.step.running import Running, device_of
from autoamp.benchmark.step.task import Task
from autoamp.benchmark.step.ways import Way
from autoamp.errors import OptionError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

_MOST = 2**20
"""No larger batch is tried."""

_STEPS = 2
"""Steps of each trial: the first creates the optimizer's state, the next holds it."""


def bytes_in(given: int | str) -> int:
    """The bytes of a number, or of a text such as "8GiB", "500 MB" or "2g".

    Raises:
        OptionError: `given` is no amount of memory above 0.
    """
    text = str(given).strip().lower()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text)
    amount = 0
    if found:
        units = _BINARY if found[3] else _UNITS
        amount = int(float(found[1]) * units[found[2]])
    if amount < 1:
        raise OptionError(
            f"memory={given!r} is no amount of memory: write 8GiB or 500MB"
        )
    return amount


def within_reach(budget: int, device: torch.device) -> int:
    """The budget, or the memory that can be allocated if that is less."""
    free = memory.available(device)
    return budget if free is None else min(budget, int(free * 0.9))


def largest_batch(way: Way, model: nn.Module, task: Task, budget: int) -> int:
    """The largest batch whose step holds at most `budget` bytes; 0 if none fits.

    A batch at which memory runs out does not fit.
    """
    return search(lambda size: _peak(way, model, task, size), budget)


def search(peak: Callable[[int], int | None], budget: int) -> int:
    """The largest size whose peak is within the budget; peaks must grow with the size.

    Args:
        peak: gives the peak of a size in bytes; None where memory runs out.
    """

    def fits(size: int) -> bool:
        found = peak(size)
        return found is not None and found <= budget

    least, most = 0, 1
    while most <= _MOST and fits(most):
        least, most = most, 2 * most
    most = min(most, _MOST + 1)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _peak(way: Way, model: nn.Module, task: Task, size: int) -> int | None:
    """The most memory held in a step of this size; None where memory runs out."""
    device = device_of(model)
    held = memory.Held(device)
    running: Running | None = None
    try:
        running = Running(way, model, replace(task, call=resized(task.call, size)))
        for _ in range(_STEPS):
            running.step(running.batch())
        own = running
        return held.peak(lambda: own.step(own.batch()))
    except Exception as error:
        if not memory.is_out_of_memory(error):
            raise
        return None
    finally:
        if running is not None:
            running.close()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
