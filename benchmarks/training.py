"""`python -m benchmarks.training`: times of a training step, beside autocast's.

Each model runs in a process of its own, with the system's own malloc; a finished one is
skipped unless `--again`.  A step is forward, backward and a step of SGD, which leaves
the low copies of all weights out of date.  All ways take one step in each round, in
another order each time; the figure of a way is the median over rounds of its time
divided by that of autocast in the same round.  With `--device cuda` the models have the
sizes that people train (`gpu_cases.py`), and each step ends when the GPU has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from . import step_times
from .bytes_models import MICRO, PAPER, WRITTEN, case_of
from .bytes_step import low_way, prepared
from .gpu_cases import batches, gpu_case, gpu_cases
from .metrics import ModelCase
from .ratios import Row
from .setting import Setting
from .step_times import CPU_BF16, rounds, scaler_of, step_of

STEM = "training"
CASES = (*PAPER, *WRITTEN, MICRO)
MICRO_BATCHES = {MICRO.name: 8}
"""Models whose step is so many forwards and backwards before the optimizer's."""

SMALL_BATCHES = f"""\
The batches are those of
the [byte counts](bytes.md); "_written" has its attention written out; "{MICRO.name}" is
{MICRO_BATCHES[MICRO.name]} micro-batches of one text each, and one step of the
optimizer."""


def names(setting: Setting) -> list[str]:
    """The models that are timed in a setting."""
    cases = gpu_cases(setting.quick) if setting.full_size else CASES
    return [case.name for case in cases]


def case_in(setting: Setting, name: str) -> ModelCase:
    """The model of a setting with that name."""
    return gpu_case(name, setting.quick) if setting.full_size else case_of(name)


def said_of_batches(setting: Setting) -> str:
    """The sentence about the batches of a setting's models."""
    return batches(setting.quick) if setting.full_size else SMALL_BATCHES


def note(setting: Setting) -> str:
    """What the table is of."""
    scaled = " with loss scaling" if setting.precision == "fp16" else ""
    return f"""\
A training step in {setting.precision} (forward, backward, SGD){scaled} as part of the \
time of the same step
under torch.autocast, medians of {rounds(setting)} interleaved rounds. \
{said_of_batches(setting)}"""


def ways(setting: Setting) -> tuple[str, ...]:
    """The columns of the table."""
    return ("fp32", "autocast", "autoamp", low_way(setting))


def measured(name: str, setting: Setting) -> Row:
    """The seconds of each way in each round."""
    case, batches_of = case_in(setting, name), MICRO_BATCHES.get(name, 1)

    def make(way: str) -> step_times.Step:
        ready = prepared(case, way, setting)
        return step_of(case, ready, batches_of, scaler_of(way, setting))

    makers = {way: partial(make, way) for way in ways(setting)}
    return step_times.measured(name, makers, setting)


def write(rows: Sequence[Row], folder: Path, setting: Setting = CPU_BF16) -> str:
    """Writes the table, its rows and its plot to `folder`; returns the text."""
    title = "Time of a training step, torch.autocast = 1"
    tables = [step_times.table(rows, ways(setting))]
    stem = folder / setting.stem(STEM)
    told = note(setting)
    return step_times.write(stem, rows, told, tables, title=title, setting=setting)


def main(arguments: Sequence[str] | None = None) -> int:
    """Times what is asked and not yet there; 1 if a way to run a model failed."""
    return step_times.run(
        "benchmarks.training", arguments, names=names, measured=measured, write=write
    )


if __name__ == "__main__":
    raise SystemExit(main())
