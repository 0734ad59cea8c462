"""`python -m benchmarks.compiled`: training steps compiled by inductor.

Each model runs in a process of its own; a finished one is skipped unless `--again`.
The bytes are those that inductor itself counts for the graphs it compiles: what each
kernel reads and writes.  autoamp's low copies of the weights are refreshed outside of
these graphs, and the bytes of that are a column of their own; under autocast the
weights are cast inside.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch._functorch import config as functorch
from torch._inductor import compile_fx, config, metrics

import autoamp
from autoamp.dtypes import HIGH_DTYPE

from . import models, processes, report, step_times
from .models import PAPER
from .processes import Row, mean, ratio, ratio_text
from .setting import Setting
from .step_times import rounds
from .training import case_in
from .ways import (
    CHANNELS_LAST,
    CPU_BF16,
    INDUCTOR,
    Step,
    low_way,
    prepared,
    scaler_of,
    step_of,
)

RIVAL_LAST = f"autocast{CHANNELS_LAST}"
EAGER = ", eager"
"""The end of the name of a way that nothing compiles."""

COMPILED = ("fp32", "autocast", "autoamp", RIVAL_LAST)
NOT_COMPILED = tuple(f"{way}{EAGER}" for way in ("autocast", "autoamp"))
"""Ways beside the compiled ones, of which inductor counts nothing."""

BYTES_NOTE = """\
Bytes that the kernels of the compiled graphs read and write, as inductor counts them
(`num_bytes_accessed`), kernels that it generated, and the bytes of the refresh of
autoamp's low copies of the weights, once a step of the optimizer and outside of the
graphs; autocast casts the weights inside, in each forward."""


def names(setting: Setting) -> list[str]:
    """The models that are compiled in a setting."""
    cases = models.gpu_cases(setting.quick) if setting.full_size else PAPER
    return [case.name for case in cases]


def ways(setting: Setting) -> tuple[str, ...]:
    """The compiled ways; full-size models take too long to compile once more."""
    return COMPILED if setting.full_size else (*COMPILED, low_way(setting))


def all_ways(setting: Setting) -> tuple[str, ...]:
    """The columns of the table of times."""
    return ways(setting) if setting.full_size else (*ways(setting), *NOT_COMPILED)


def measured(name: str, setting: Setting) -> Row:
    """The seconds of each way in each round, and what inductor counts."""
    case = case_in(setting, name)
    counted: dict[str, dict[str, int]] = {}

    def make(way: str) -> Step:
        if way in NOT_COMPILED:
            ready = prepared(case, way.removesuffix(EAGER), setting)
            return step_of(case, ready, scaler=scaler_of(way, setting))
        ready = prepared(case, way + INDUCTOR, setting)
        step = step_of(case, ready, scaler=scaler_of(way, setting))
        with inductors_count() as count:
            step()
        counted[way] = {**count, "refreshed": refreshed_bytes(ready.model, setting)}
        return step

    chosen = step_times.ways_of(name, all_ways(setting))
    makers = {way: partial(make, way) for way in chosen}
    row = step_times.measured(name, makers, setting)
    for way, figures in row["ways"].items():
        figures.update(counted.get(way, {}))
    return row


@contextmanager
def inductors_count() -> Iterator[dict[str, int]]:
    """Bytes and kernels of the graphs that inductor compiles in the region.

    Inductor counts the bytes where its log of metrics is asked for; the log's lines are
    not shown.
    """
    log = compile_fx.inductor_metrics_log
    level, count = log.level, {"bytes": 0, "kernels": 0}
    metrics.reset()
    log.setLevel(logging.INFO)
    log.addFilter(_not_shown)
    try:
        # Of a graph that is taken from a cache nothing is counted.
        with (
            config.patch(fx_graph_cache=False),
            functorch.patch(enable_autograd_cache=False),
        ):
            yield count
    finally:
        log.removeFilter(_not_shown)
        log.setLevel(level)
    count["bytes"] = metrics.num_bytes_accessed
    count["kernels"] = metrics.generated_kernel_count


def _not_shown(_: logging.LogRecord) -> bool:
    return False


def refreshed_bytes(model: nn.Module, setting: Setting = CPU_BF16) -> int:
    """Bytes read and written to make the low copies of a model's weights anew."""
    if not autoamp.is_converted(model):
        return 0
    kept = autoamp.report(model).cast_counts.kept_bytes
    low = setting.low.itemsize
    return kept * (HIGH_DTYPE.itemsize + low) // low


def _megabytes(row: Row, way: str, kind: str) -> str:
    found = row["ways"].get(way)
    if found is None:
        return step_times.without_figure(row, way)
    return f"{found[kind] / 1e6:.0f}"


def _kernels(row: Row, way: str) -> str:
    found = row["ways"].get(way)
    return str(found["kernels"]) if found else step_times.without_figure(row, way)


def bytes_table(rows: Sequence[Row], ways: Sequence[str]) -> str:
    """The Markdown table of inductor's own counts."""
    header = ("model", *(f"{way}, MB" for way in ways), "refresh, MB")
    header += ("autoamp / autocast", *(f"{way}, kernels" for way in ways))
    lines = [
        [
            row["name"],
            *(_megabytes(row, way, "bytes") for way in ways),
            _megabytes(row, "autoamp", "refreshed"),
            ratio_text(ratio(row, "bytes")),
            *(_kernels(row, way) for way in ways),
        ]
        for row in rows
    ]
    empty = [""] * len(ways)
    foot = ["geometric mean", *empty, "", ratio_text(mean(rows, "bytes")), *empty]
    return report.markdown(header, [*lines, foot])


def text(rows: Sequence[Row], setting: Setting, machine: str) -> str:
    """The page."""
    batches = "The batches are those of the [byte counts](bytes.md)."
    if setting.full_size:
        batches = models.said_of_gpu_batches(setting.quick)
    note = f"""\
A training step in {setting.precision} (forward, backward, SGD) compiled by inductor, \
as part of the
time of the same step of `torch.compile` under torch.autocast, medians of \
{rounds(setting)}
interleaved rounds. {batches}
"Eager" ways are not compiled."""
    timed = step_times.table(rows, all_ways(setting))
    tables = [timed, BYTES_NOTE, bytes_table(rows, ways(setting))]
    on_gpu = step_times.gpu_tables(rows, setting)
    return processes.page(rows, machine, note, *tables, *on_gpu)


TABLE = processes.ModelTable("compiled", names, measured, text, step_times.brief)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
