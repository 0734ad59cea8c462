"""`python -m benchmarks.inference`: GPT-2 at batch 1, without gradients.

Each text, under `torch.no_grad` and under `torch.inference_mode`, is measured in a
process of its own; a finished one is skipped unless `--again`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from tests.models.case import Args, tokens

from . import processes, step_times
from .models import QUICK_VOCAB, full_case
from .processes import Row
from .setting import Setting
from .step_times import rounds
from .ways import Step, low_way, prepared

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
BY_DEFAULT = "autoamp, by default"
"""The way of a model converted with the default options, `do_no_harm` among them."""


def names(setting: Setting) -> list[str]:
    """A mode and a number of tokens: "no_grad 32"."""
    lengths = (1, 32) if setting.quick else (1, 8, 32, 128)
    return [f"{mode} {length}" for mode in MODES for length in lengths]


def ways(setting: Setting) -> tuple[str, ...]:
    """The columns of the tables."""
    return ("fp32", "autocast", low_way(setting), "autoamp", BY_DEFAULT)


def measured(name: str, setting: Setting) -> Row:
    """The seconds of a forward of each way in each round."""
    mode, _, length = name.partition(" ")
    vocab = QUICK_VOCAB if setting.quick else 50257

    def text(seed: int) -> Args:
        return (), {"input_ids": tokens(seed, 1, int(length), vocab=vocab)}

    case = full_case("gpt2", text, setting.quick)

    def make(way: str) -> Step:
        base, _, _ = way.partition(",")
        ready = prepared(case, base, setting, do_no_harm=way == BY_DEFAULT)
        ready.model.eval()

        def forward() -> None:
            with MODES[mode]():
                ready.forward()

        return forward

    makers = {way: partial(make, way) for way in ways(setting)}
    return step_times.measured(name, makers, setting)


def text(rows: Sequence[Row], setting: Setting, machine: str) -> str:
    """The page."""
    low = low_way(setting)
    note = f"""\
A forward of GPT-2{", a small one," * setting.quick} of one text in \
{setting.precision}, by its mode and the number of tokens, medians of
{rounds(setting)} interleaved rounds: as part of the time of the same forward under \
torch.autocast, then
as part of that of the model in {low}. "autoamp" is converted with \
`do_no_harm=False`."""
    tables = [step_times.table(rows, ways(setting), base) for base in ("autocast", low)]
    on_gpu = step_times.gpu_tables(rows, setting)
    return processes.page(rows, machine, note, *tables, *on_gpu)


TABLE = processes.ModelTable("inference", names, measured, text, step_times.brief)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
