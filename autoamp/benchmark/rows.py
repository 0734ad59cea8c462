"""Makes the row of a way from its times and its figures."""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoamp.benchmark.clock import outliers, ratio, sigma
from autoamp.benchmark.energy import co2_grams, estimate
from autoamp.benchmark.figures import Figures
from autoamp.benchmark.record import Row
from autoamp.benchmark.step.batch import batch_size, token_count
from autoamp.benchmark.step.running import Running
from autoamp.benchmark.step.task import Task
from autoamp.benchmark.step.ways import Way

_AGAIN = "measure again when nothing else runs"


@dataclass
class Entry:
    """A way while it is measured."""

    way: Way
    figures: Figures | None = None
    runner: Running | None = None
    error: str = ""
    joules: float | None = None
    energy_from: str = ""
    growth: float | None = None
    times: list[float] = field(default_factory=list)
    data_times: list[float] = field(default_factory=list)

    def take(self) -> None:
        """Takes the times from the copy that was timed."""
        if self.runner is not None:
            self.times = self.runner.seconds
            self.data_times = self.runner.data_seconds

    def close(self) -> None:
        """Releases the copy."""
        if self.runner is not None:
            self.take()
            self.runner.close()
            self.runner = None
            gc.collect()


def row_of(
    entry: Entry,
    task: Task,
    base: Sequence[float],
    *,
    paired: bool,
    grams_per_kwh: float | None = None,
) -> Row:
    """The row of a way.

    Args:
        base: the times of fp32.
        paired: whether the n-th times of both belong to one round.
        grams_per_kwh: grams of CO2 of a kilowatt-hour.
    """
    way, loads = entry.way, task.data is not None
    size = None if loads else batch_size(task.call)
    row = Row(way.name, way.kind, way.compiled, size, entry.error)
    known, times = entry.figures, tuple(entry.times)
    if entry.error or known is None:
        return row
    middle = statistics.median(times)
    share = ratio(times, base, paired=paired) if base else (None, None)
    joules, energy_from = entry.joules, entry.energy_from
    if joules is None and (joules := estimate(known)) is not None:
        energy_from = "estimate"
    grams = None
    if joules is not None and grams_per_kwh is not None:
        grams = co2_grams(joules, grams_per_kwh)
    tokens = None if loads else token_count(task.call)
    if task.kind == "generate":
        tokens = (size or 1) * task.tokens
    return replace(
        row,
        seconds=middle,
        sigma=sigma(times),
        ratio=share[0],
        ratio_sigma=share[1],
        times=times,
        data_seconds=statistics.median(entry.data_times) if loads else None,
        first_call=known.first_call,
        samples=size / middle if size else None,
        tokens=tokens / middle if tokens else None,
        peak=known.peak,
        saved=known.saved,
        moved=known.moved,
        casts=known.casts,
        flops=known.flops,
        low_flops=known.low_flops,
        losses=known.losses,
        growth=entry.growth,
        joules=joules,
        energy_from=energy_from,
        co2_grams=grams,
    )


def disturbed(row: Row) -> list[str]:
    """A note if some times of a row lie far from the others."""
    far = outliers(row.times) if row.times else 0
    if not far:
        return []
    said = f"{far} of {len(row.times)} times of {row.way} lie far from its median"
    return [f"{said}: another program was running; {_AGAIN}"]


def busy() -> list[str]:
    """A note if other programs use more cores than this machine has."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return []
    said = f"The machine was busy already (load {load:.1f} on {cores} cores)"
    return [f"{said}, so the times are unreliable; {_AGAIN}"]
