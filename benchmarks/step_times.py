"""Times of a step, way by way: measured in turn, and set beside autocast's."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import on_gpu, report, turns
from .bars import grouped, svg
from .errors import Batch
from .metrics import ModelCase
from .processes import LIMIT_S, commit, commits, failures, fill, in_a_process, said
from .ratios import Row
from .setting import Setting, add_arguments, setting_of
from .timing import interleaved, ratios

BASELINE = "autocast"
WARM_UP, FP16_WARM_UP = 3, 12
ROUNDS, ROUNDS_ON_GPU, QUICK_ROUNDS = 11, 7, 3
STEPS_ON_GPU = 4
"""Steps of a timed round on a GPU: nobody waits for it between them, as in training."""
CPU_BF16 = Setting()

Prepared = tuple[nn.Module, Callable[[], AbstractContextManager[Any]], Batch]
"""The model to call, the context of its forward, and the batch it gets."""


Step = Callable[[], None]


def scaler_of(way: str, setting: Setting) -> torch.amp.GradScaler | None:
    """The loss scaler that a way needs beside it: autocast's, in fp16."""
    needed = way.startswith("autocast") and setting.precision == "fp16"
    return torch.amp.GradScaler(setting.device) if needed else None


def step_of(
    case: ModelCase,
    prepared: Prepared,
    batches: int = 1,
    scaler: torch.amp.GradScaler | None = None,
) -> Step:
    """A training step: forwards and backwards of `batches`, and a step of SGD."""
    model, context, batch = prepared
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, foreach=True)
    model.train()

    def step() -> None:
        for _ in range(batches):
            args, kwargs = copy.copy(batch)
            with context():
                output = model(*args, **kwargs)
            loss = case.loss(output)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def measured(
    name: str,
    steps: Mapping[str, Callable[[], Step]],
    setting: Setting = CPU_BF16,
) -> Row:
    """The seconds of each way in each round; a way that fails has its error instead.

    Args:
        steps: for each way the function that makes its step.
    """
    row: Row = {"name": name, "commit": commit(), "ways": {}, "failures": {}}
    ready, held = {}, {}
    for way, make in steps.items():
        try:
            torch.manual_seed(0)
            before = on_gpu.allocated(setting.device)
            warmed = partial(_warmed, make, warm_up(setting))
            ready[way] = turns.prepared_beside_others(warmed)
            held[way] = on_gpu.allocated(setting.device) - before
        except Exception as error:  # noqa: BLE001 - the other ways are still timed
            traceback.print_exc()
            row["failures"][way] = said(error)
    if turns.wait():
        for step in ready.values():  # their memory went back to the device
            step()
    count = steps_a_round(setting)
    several = {way: partial(repeated, step, count) for way, step in ready.items()}
    taken = interleaved(several, rounds(setting), setting.device)
    row["ways"] = {
        way: {"seconds": [each / count for each in seconds]}
        for way, seconds in taken.items()
    }
    if setting.device != "cpu":
        for way, step in ready.items():
            counted = on_gpu.counted(step, held[way], setting.device)
            row["ways"][way].update(counted)
    return row


def _warmed(make: Callable[[], Step], times: int) -> Step:
    step = make()
    repeated(step, times)
    return step


def repeated(step: Step, times: int) -> None:
    """Takes a step several times."""
    for _ in range(times):
        step()


def steps_a_round(setting: Setting) -> int:
    """Steps of one timed round."""
    return 1 if setting.device == "cpu" else STEPS_ON_GPU


def rounds(setting: Setting) -> int:
    """Timed rounds."""
    if setting.quick:
        return QUICK_ROUNDS
    return ROUNDS if setting.device == "cpu" else ROUNDS_ON_GPU


def warm_up(setting: Setting) -> int:
    """Steps before the timed ones; a dynamic loss scale takes some to settle."""
    return WARM_UP if setting.precision != "fp16" or setting.quick else FP16_WARM_UP


def shares(row: Row) -> dict[str, float]:
    """For each way the median over rounds of its time divided by autocast's."""
    taken = {way: each["seconds"] for way, each in row["ways"].items()}
    return ratios(taken, BASELINE) if BASELINE in taken else {}


def brief(row: Row) -> str:
    """The shares of a row in one line."""
    return ", ".join(f"{way} {share:.2f}" for way, share in shares(row).items())


def table(rows: Sequence[Row], ways: Sequence[str]) -> str:
    """The Markdown table of shares of autocast's time, geometric means at the foot."""
    found = {row["name"]: shares(row) for row in rows}
    others = [way for way in ways if way != BASELINE]
    lines = []
    for row in rows:
        taken = row["ways"].get(BASELINE)
        time = f"{1e3 * statistics.median(taken['seconds']):.0f}" if taken else "failed"
        cells = [_cell(found[row["name"]], way) for way in others]
        lines.append([row["name"], time, *cells])
    means = []
    for way in others:
        every = [each[way] for each in found.values() if way in each]
        means.append(f"{statistics.geometric_mean(every):.2f}" if every else "-")
    header = ("model", f"{BASELINE}, ms", *others)
    return report.markdown(header, [*lines, ["geometric mean", "", *means]])


def gpu_table(rows: Sequence[Row], ways: Sequence[str]) -> str:
    """The Markdown table of memory, of kernels and of the time in which they run."""
    lines = []
    for row in rows:
        found = [row["ways"].get(way) for way in ways]
        lines.append([row["name"], *(_on_gpu(each) for each in found)])
    header = ("model", *(f"{way}: MiB, kernels, ms" for way in ways))
    return report.markdown(header, lines)


def _on_gpu(way: Mapping[str, Any] | None) -> str:
    if way is None or "peak" not in way:
        return "failed"
    memory = f"{(way['held'] + way['peak']) / 2**20:.0f}"
    if "kernels" not in way:
        return memory
    return f"{memory}, {way['kernels']}, {1e3 * way['busy']:.1f}"


GPU_NOTE = f"""\
On the GPU: the memory of a way (its weights and copies, and the most that a step
allocates beside them), the kernels of a step, and the time in which they run: a step
that takes longer waits for Python. A timed round is {STEPS_ON_GPU} steps between which
nobody waits for the GPU."""


def _cell(found: Mapping[str, float], way: str) -> str:
    return f"{found[way]:.2f}" if way in found else "failed"


def write(
    stem: Path,
    rows: Sequence[Row],
    note: str,
    tables: Sequence[str],
    *,
    title: str,
    setting: Setting = CPU_BF16,
) -> str:
    """Writes tables as .md, rows as .json and a plot as .svg; returns the text."""
    if setting.device != "cpu":
        every = dict.fromkeys(way for row in rows for way in row["ways"])
        tables = [*tables, GPU_NOTE, gpu_table(rows, [*every])]
    text = write_text(stem, rows, note, tables, setting)
    drawn = {row["name"]: shares(row) for row in rows if shares(row)}
    plots = [grouped(title, drawn)] if drawn else []
    report.put(stem.with_suffix(".svg"), svg(plots))
    return text


def write_text(
    stem: Path,
    rows: Sequence[Row],
    note: str,
    tables: Sequence[str],
    setting: Setting,
) -> str:
    """Writes tables as .md and rows as .json; returns the text."""
    head = f"{setting.capability}; commit {commits(rows)}"
    parts = [head, "", note, *(line for each in tables for line in ("", each))]
    text = "\n".join([*parts, "", *failures(rows)]).rstrip() + "\n"
    data = {"capability": setting.capability, "models": list(rows)}
    report.write(stem, text, data)
    return text


def run(
    module: str,
    arguments: Sequence[str] | None,
    *,
    names: Callable[[Setting], Sequence[str]],
    measured: Callable[[str, Setting], Row],
    write: Callable[[Sequence[Row], Path, Setting], str],
    brief: Callable[[Row], str] = brief,
) -> int:
    """The command line of a benchmark; 1 if a way to run a model failed.

    The benchmark is told where it runs, and in what precision.

    Args:
        module: what `python -m` is given.
        names: the models of a setting; all are measured where none is named.
        measured: measures one model in a setting, in this process.
        write: writes rows to a folder, and returns the table.
        brief: a row in one line, for the terminal.
    """
    parser = _parser(module)
    add_arguments(parser)
    given = parser.parse_args(arguments)
    setting = setting_of(parser, given)
    if given.one:
        print(json.dumps(measured(given.one, setting)))
        return 0
    stem = given.out / setting.stem(module.rpartition(".")[2])
    where = setting.arguments()
    take = partial(in_a_process, module=module, arguments=where, limit=given.limit)

    def written(rows: Sequence[Row], folder: Path) -> str:
        return write(rows, folder, setting)

    every = names(setting)
    return _filled(given, every, stem, take=take, write=written, brief=brief)


def _parser(module: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("names", nargs="*", help="models (all)")
    parser.add_argument("--again", action="store_true", help="finished models too")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--one", metavar="NAME", help="one model, printed as JSON")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds a model")
    return parser


def _filled(
    given: argparse.Namespace,
    every: Sequence[str],
    stem: Path,
    *,
    take: Callable[[str], Row],
    write: Callable[[Sequence[Row], Path], str],
    brief: Callable[[Row], str],
) -> int:
    wanted, again = given.names or every, given.again
    print(fill(wanted, stem, take=take, write=write, brief=brief, again=again))
    rows = json.loads(stem.with_suffix(".json").read_text())["models"]
    return int(bool(failures(rows)))
