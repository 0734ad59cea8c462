"""`python -m benchmarks.training`: times of a training step, beside autocast's.

Each model runs in a process of its own, with the system's own malloc; a finished one is
skipped unless `--again`.  A step is forward, backward and a step of SGD, which leaves
the low copies of all weights out of date.  All ways take one step in each round, in
another order each time; the figure of a way is the median over rounds of its time
divided by that of autocast in the same round.  With `--device cuda` the models have the
sizes that people train, and each step ends when the GPU has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from . import models, processes, step_times
from .metrics import ModelCase
from .models import MICRO, MICRO_BATCHES, PAPER, WRITTEN, case_of
from .processes import Row
from .setting import Setting
from .step_times import rounds
from .ways import CHANNELS_LAST, Step, low_way, prepared, scaler_of, step_of

SMALL_BATCHES = f"""\
The batches are those of
the [byte counts](bytes.md); "_written" has its attention written out; "{MICRO.name}" is
{MICRO_BATCHES} micro-batches of one text each, and one step of the
optimizer."""


def names(setting: Setting) -> list[str]:
    """The models that are timed in a setting."""
    small = (*PAPER, *WRITTEN, MICRO)
    cases = models.gpu_cases(setting.quick) if setting.full_size else small
    return [case.name for case in cases]


def in_one_batch(setting: Setting) -> list[str]:
    """Those of which a step has one batch."""
    return [name for name in names(setting) if name != MICRO.name]


def case_in(setting: Setting, name: str) -> ModelCase:
    """The model of a setting with that name."""
    if not setting.full_size or name.startswith("zoo/"):
        return case_of(name)
    return {case.name: case for case in models.gpu_cases(setting.quick)}[name]


def ways(setting: Setting) -> tuple[str, ...]:
    """The columns of the table."""
    plain = ("fp32", "autocast", "autoamp", low_way(setting))
    return (*plain, *(way + CHANNELS_LAST for way in plain[1:]))


def measured(name: str, setting: Setting) -> Row:
    """The seconds of each way in each round."""
    case = case_in(setting, name)
    batches = MICRO_BATCHES if name == MICRO.name else 1

    def make(way: str) -> Step:
        ready = prepared(case, way, setting)
        return step_of(case, ready, batches, scaler_of(way, setting))

    chosen = step_times.ways_of(name, ways(setting))
    makers = {way: partial(make, way) for way in chosen}
    return step_times.measured(name, makers, setting)


def text(rows: Sequence[Row], setting: Setting, machine: str) -> str:
    """The page."""
    scaled = " with loss scaling" if setting.precision == "fp16" else ""
    batches = SMALL_BATCHES
    if setting.full_size:
        batches = models.said_of_gpu_batches(setting.quick)
    note = f"""\
A training step in {setting.precision} (forward, backward, SGD){scaled} as part of the \
time of the same step
under torch.autocast, medians of {rounds(setting)} interleaved rounds. {batches}"""
    timed = step_times.table(rows, ways(setting))
    on_gpu = step_times.gpu_tables(rows, setting)
    return processes.page(rows, machine, note, timed, *on_gpu)


TABLE = processes.ModelTable("training", names, measured, text, step_times.brief)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
