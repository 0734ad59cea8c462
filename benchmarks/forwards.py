"""`python -m benchmarks.forwards`: times of a forward without gradients.

The models and batches are those of `benchmarks.training`, in inference: each model in
eval mode, without labels, under `torch.no_grad`, as it is and compiled by inductor.  A
model runs in a process of its own, and a finished one is skipped unless `--again`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from . import step_times
from .bytes_step import low_way, prepared
from .compiled import compiled
from .ratios import Row
from .setting import Setting
from .step_times import CPU_BF16, Prepared, Step, rounds
from .training import case_in, names, said_of_batches

STEM = "forwards"
INDUCTOR = ", inductor"
"""The end of the name of a way that inductor compiles."""


def ways(setting: Setting) -> tuple[str, ...]:
    """The columns of the table."""
    by_inductor = (f"{way}{INDUCTOR}" for way in ("autocast", "autoamp"))
    return ("fp32", "autocast", "autoamp", low_way(setting), *by_inductor)


def forward_of(ready: Prepared) -> Step:
    """A forward in eval mode, without labels and gradients."""
    model, context, (args, kwargs) = ready
    given = {name: value for name, value in kwargs.items() if name != "labels"}
    if getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = kwargs["labels"]
    model.eval()

    def step() -> None:
        with torch.no_grad(), context():
            model(*args, **given)

    return step


def measured(name: str, setting: Setting) -> Row:
    """The seconds of each way in each round."""
    case = case_in(setting, name)

    def make(way: str) -> Step:
        if way.endswith(INDUCTOR):
            return forward_of(compiled(case, way.removesuffix(INDUCTOR), setting))
        return forward_of(prepared(case, way, setting))

    makers = {way: partial(make, way) for way in ways(setting)}
    return step_times.measured(name, makers, setting)


def write(rows: Sequence[Row], folder: Path, setting: Setting = CPU_BF16) -> str:
    """Writes the table, its rows and its plot to `folder`; returns the text."""
    note = f"""\
A forward without gradients in {setting.precision}, in eval mode, as part of the time \
of the same forward under torch.autocast, medians of {rounds(setting)} interleaved \
rounds; "inductor" is the model compiled by inductor. {said_of_batches(setting)}"""
    title = "Time of a forward without gradients, torch.autocast = 1"
    tables = [step_times.table(rows, ways(setting))]
    stem = folder / setting.stem(STEM)
    return step_times.write(stem, rows, note, tables, title=title, setting=setting)


def main(arguments: Sequence[str] | None = None) -> int:
    """Times what is asked and not yet there; 1 if a way to run a model failed."""
    return step_times.run(
        "benchmarks.forwards", arguments, names=names, measured=measured, write=write
    )


if __name__ == "__main__":
    raise SystemExit(main())
