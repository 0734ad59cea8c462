"""`python -m benchmarks.training`: times of a training step, beside autocast's.

Each model runs in a process of its own, which keeps the memory that it frees; a
finished one is skipped unless `--again`.  A step is forward, backward and a step of
SGD, which leaves the low copies of all weights out of date.  All ways take one step in
each round, in another order each time; the figure of a way is the median over rounds of
its time divided by that of autocast in the same round.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from . import step_times
from .bytes_models import MICRO, PAPER, WRITTEN, case_of
from .bytes_step import WAYS, prepared
from .ratios import Row
from .step_times import ROUNDS, step_of

STEM = "training"
CASES = (*PAPER, *WRITTEN, MICRO)
MICRO_BATCHES = {MICRO.name: 8}
"""Models whose step is so many forwards and backwards before the optimizer's."""

NOTE = f"""\
A training step in bf16 (forward, backward, SGD) as part of the time of the same step
under torch.autocast, medians of {ROUNDS} interleaved rounds. The batches are those of
the [byte counts](bytes.md); "_written" has its attention written out; "{MICRO.name}" is
{MICRO_BATCHES[MICRO.name]} micro-batches of one text each, and one step of the
optimizer."""


def measured(name: str) -> Row:
    """The seconds of each way in each round."""
    case, batches = case_of(name), MICRO_BATCHES.get(name, 1)

    def make(way: str) -> step_times.Step:
        return step_of(case, prepared(case, way), batches)

    return step_times.measured(name, {way: partial(make, way) for way in WAYS})


def write(rows: Sequence[Row], folder: Path) -> str:
    """Writes the table, its rows and its plot to `folder`; returns the text."""
    title = "Time of a training step, torch.autocast = 1"
    tables = [step_times.table(rows, WAYS)]
    return step_times.write(folder / STEM, rows, NOTE, tables, title)


def main(arguments: Sequence[str] | None = None) -> int:
    """Times what is asked and not yet there; 1 if a way to run a model failed."""
    return step_times.run(
        "benchmarks.training",
        arguments,
        names=[case.name for case in CASES],
        measured=measured,
        write=write,
    )


if __name__ == "__main__":
    raise SystemExit(main())
