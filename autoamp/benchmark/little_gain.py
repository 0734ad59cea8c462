"""Where a model gains little, measures whether its step grows with the batch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autoamp.ask.progress import told
from autoamp.benchmark.answer import WORTH
from autoamp.benchmark.clock import growth_of_steps
from autoamp.benchmark.rows import Entry
from autoamp.benchmark.step.batch import batch_size, resized
from autoamp.benchmark.step.task import Task
from autoamp.calibrate.clock import surely_less


def look_closer(entries: Sequence[Entry], task: Task) -> None:
    """Times twice the batch in fp32 and autoamp, if autoamp gains little.

    Nothing is noted for a batch that cannot be doubled, or whose double does not fit
    into memory.
    """
    base, ours = (_timed(entries, kind) for kind in ("fp32", "autoamp"))
    size = batch_size(task.call)
    if base is None or ours is None or not size or task.data is not None:
        return
    middles = [statistics.median(each.times) for each in (ours, base)]
    if surely_less(ours.times, base.times) and middles[0] <= WORTH * middles[1]:
        return
    twice = resized(task.call, 2 * size)
    for entry in told([base, ours], "timing twice the batch"):
        try:
            entry.growth = growth_of_steps(entry.runner, task.call, twice)
        except Exception:  # noqa: BLE001 (the model may take one batch size only)
            return


def _timed(entries: Sequence[Entry], kind: str) -> Entry | None:
    """The entry of a way that was timed and whose copy is still held."""
    found = (e for e in entries if e.way.kind == kind and not e.way.compiled)
    return next((e for e in found if e.runner is not None and e.times), None)
