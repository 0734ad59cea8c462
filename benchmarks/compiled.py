"""`python -m benchmarks.compiled`: training steps compiled by inductor.

Each model runs in a process of its own; a finished one is skipped unless `--again`.
The bytes are those that inductor itself counts for the graphs it compiles: what each
kernel reads and writes.  autoamp's low copies of the weights are refreshed outside of
these graphs, and the bytes of that are a column of their own; under autocast the
weights are cast inside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch
from torch._inductor import compile_fx, config, metrics

import autoamp
from autoamp.dtypes import HIGH_DTYPE

from . import report, step_times
from .bytes_models import PAPER
from .bytes_step import prepared
from .gpu_cases import batches, gpu_cases
from .metrics import ModelCase, to_device
from .ratios import Row, mean, ratio
from .setting import Setting
from .step_times import CPU_BF16, Prepared, Step, rounds, scaler_of, step_of
from .training import case_in

STEM = "compiled"
EXACT = "autoamp, exact casts"
WAYS = ("fp32", "autocast", "autoamp", EXACT)

BYTES_NOTE = """\
Bytes that the kernels of the compiled graphs read and write, as inductor counts them
(`num_bytes_accessed`), kernels that it generated, and the bytes of the refresh of
autoamp's low copies of the weights, once a step of the optimizer and outside of the
graphs; autocast casts the weights inside, in each forward."""

EXACT_NOTE = """\
"Exact casts" is autoamp
with `exact_casts=True`: inductor rounds at each cast, also inside a kernel."""


def names(setting: Setting) -> list[str]:
    """The models that are compiled in a setting."""
    cases = gpu_cases(setting.quick) if setting.full_size else PAPER
    return [case.name for case in cases]


def ways(setting: Setting) -> tuple[str, ...]:
    """The columns of the tables; full-size models take too long to compile once more.

    Ten minutes are enough to compile a few full-size models in three ways.
    """
    return WAYS[:-1] if setting.full_size else WAYS


def note(setting: Setting) -> str:
    """What the table of times is of."""
    small = "The batches are those of the [byte counts](bytes.md)."
    said = batches(setting.quick) if setting.full_size else small
    return f"""\
A training step in {setting.precision} (forward, backward, SGD) compiled by inductor, \
as part of the
time of the same step of `torch.compile` under torch.autocast, medians of \
{rounds(setting)}
interleaved rounds. {said}"""


def measured(name: str, setting: Setting) -> Row:
    """The seconds of each way in each round, and what inductor counts."""
    case = case_in(setting, name)
    counted: dict[str, dict[str, int]] = {}

    def make(way: str) -> Step:
        ready = compiled(case, way, setting)
        step = step_of(case, ready, scaler=scaler_of(way, setting))
        with inductors_count() as count:
            step()
        counted[way] = {**count, "refreshed": refreshed_bytes(ready[0], setting)}
        return step

    makers = {way: partial(make, way) for way in ways(setting)}
    row = step_times.measured(name, makers, setting)
    for way, figures in row["ways"].items():
        figures.update(counted[way])
    return row


def compiled(case: ModelCase, way: str, setting: Setting = CPU_BF16) -> Prepared:
    """The model compiled by inductor in one of `WAYS`, a context and the batch."""
    if way not in ("autoamp", EXACT):
        model, context, batch = prepared(case, way, setting)
        return torch.compile(model), context, batch  # type: ignore[return-value]
    options: dict[str, Any] = {"do_no_harm": False, "strict": True}
    options["exact_casts"] = way == EXACT
    model = case.model().to(setting.device)
    converted = autoamp.convert(
        model, precision=setting.precision, backend="inductor", **options
    )
    return converted, nullcontext, to_device(case.inputs(0), setting.device)


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


def _megabytes(way: str, kind: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = row["ways"].get(way)
        return f"{found[kind] / 1e6:.0f}" if found else "failed"

    return cell


def _kernels(way: str) -> Callable[[Row], str]:
    return lambda row: str(row["ways"].get(way, {}).get("kernels", "failed"))


def _ratio(row: Row) -> str:
    found = ratio(row, "bytes")
    return f"{found:.3f}" if found else "-"


def bytes_table(rows: Sequence[Row], ways: Sequence[str] = WAYS) -> str:
    """The Markdown table of inductor's own counts."""
    columns: list[tuple[str, Callable[[Row], str]]] = [
        *((f"{way}, MB", _megabytes(way, "bytes")) for way in ways),
        ("refresh, MB", _megabytes("autoamp", "refreshed")),
        ("autoamp / autocast", _ratio),
        *((f"{way}, kernels", _kernels(way)) for way in ways),
    ]
    lines = [[row["name"], *(cell(row) for _, cell in columns)] for row in rows]
    average = mean(rows, "bytes")
    shown = f"{average:.3f}" if average else "-"
    foot = [
        "geometric mean",
        *("" for _ in (*ways, "refresh")),
        shown,
        *("" for _ in ways),
    ]
    return report.markdown(["model", *(head for head, _ in columns)], [*lines, foot])


def write(rows: Sequence[Row], folder: Path, setting: Setting = CPU_BF16) -> str:
    """Writes the tables, their rows and a plot to `folder`; returns the text."""
    title = "Time of a compiled training step, torch.autocast = 1"
    chosen = ways(setting)
    said = f"{BYTES_NOTE} {EXACT_NOTE}" if EXACT in chosen else BYTES_NOTE
    tables = [step_times.table(rows, chosen), said, bytes_table(rows, chosen)]
    stem = folder / setting.stem(STEM)
    told = note(setting)
    return step_times.write(stem, rows, told, tables, title=title, setting=setting)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked and not yet there; 1 if a way to run a model failed."""
    return step_times.run(
        "benchmarks.compiled", arguments, names=names, measured=measured, write=write
    )


if __name__ == "__main__":
    raise SystemExit(main())
