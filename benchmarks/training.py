"""`python -m benchmarks.training`: times of a training step, beside autocast's.

Each model runs in a process of its own, which keeps the memory that it frees; a
finished one is skipped unless `--again`.  A step is forward, backward and a step of
SGD, which leaves the low copies of all weights out of date.  All ways take one step in
each round, in another order each time; the figure of a way is the median over rounds of
its time divided by that of autocast in the same round.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.models.case import Case

from . import report
from .bytes_models import MICRO, PAPER, WRITTEN, case_of
from .bytes_rows import Row
from .bytes_step import WAYS, prepared
from .bytes_table import commit, in_a_process, said
from .capability import capability
from .timing import interleaved, keep_freed_memory, ratios

STEM = "training"
BASELINE = "autocast"
WARM_UP = 3
ROUNDS = 11
CASES = (*PAPER, *WRITTEN, MICRO)
MICRO_BATCHES = {MICRO.name: 8}
"""Models whose step is so many forwards and backwards before the optimizer's."""

OTHERS = tuple(way for way in WAYS if way != BASELINE)
HEADER = ("model", "autocast, ms", *OTHERS)

NOTE = f"""\
A training step in bf16 (forward, backward, SGD) as part of the time of the same step
under torch.autocast, medians of {ROUNDS} interleaved rounds. The batches are those of
the [byte counts](bytes.md); "_written" has its attention written out; "{MICRO.name}" is
{MICRO_BATCHES[MICRO.name]} micro-batches of one text each, and one step of the
optimizer."""


def step_of(case: Case, way: str) -> Callable[[], None]:
    """A training step of one way to run a model, on one batch."""
    model, context, batch = prepared(case, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, foreach=True)
    model.train()

    def step() -> None:
        for _ in range(MICRO_BATCHES.get(case.name, 1)):
            args, kwargs = copy.copy(batch)
            with context():
                output = model(*args, **kwargs)
            case.loss(output).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measured(name: str) -> Row:
    """The seconds of each way in each round; a way that fails has its error instead."""
    keep_freed_memory()
    row: Row = {"name": name, "commit": commit(), "ways": {}, "failures": {}}
    steps = {}
    for way in WAYS:
        try:
            torch.manual_seed(0)
            step = step_of(case_of(name), way)
            for _ in range(WARM_UP):
                step()
            steps[way] = step
        except Exception as error:  # noqa: BLE001 - the other ways are still timed
            row["failures"][way] = said(error)
    row["ways"] = {w: {"seconds": t} for w, t in interleaved(steps, ROUNDS).items()}
    return row


def table(rows: Sequence[Row]) -> str:
    """The Markdown table, with geometric means at the foot."""
    found = {row["name"]: _ratios(row) for row in rows}
    lines = []
    for row in rows:
        taken = row["ways"].get(BASELINE)
        time = f"{1e3 * statistics.median(taken['seconds']):.0f}" if taken else "failed"
        lines.append(
            [row["name"], time, *(_cell(found[row["name"]], w) for w in OTHERS)]
        )
    means: list[str] = []
    for way in OTHERS:
        every = [each[way] for each in found.values() if way in each]
        means.append(f"{statistics.geometric_mean(every):.2f}" if every else "-")
    return report.markdown(HEADER, [*lines, ["geometric mean", "", *means]])


def _ratios(row: Row) -> dict[str, float]:
    taken = {way: each["seconds"] for way, each in row["ways"].items()}
    return ratios(taken, BASELINE) if BASELINE in taken else {}


def _cell(found: dict[str, float], way: str) -> str:
    return f"{found[way]:.2f}" if way in found else "failed"


def write(rows: Sequence[Row], folder: Path) -> str:
    """Writes training.md and training.json to `folder`; returns the text."""
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    failures = [
        f"- {row['name']}, {way}: {why}"
        for row in rows
        for way, why in row["failures"].items()
    ]
    head = f"{capability('cpu')}; commit {commits}"
    text = "\n".join([head, "", NOTE, "", table(rows), "", *failures]).rstrip() + "\n"
    data: dict[str, Any] = {"capability": capability("cpu"), "models": list(rows)}
    report.write(folder / STEM, text, data)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Times what is asked and not yet there; 1 if a way to run a model failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training")
    parser.add_argument("names", nargs="*", help="models (all)")
    parser.add_argument("--again", action="store_true", help="finished models too")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--one", metavar="NAME", help="one model, printed as JSON")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measured(options.one)))
        return 0
    path = (options.out / STEM).with_suffix(".json")
    rows: dict[str, Row] = {}
    if path.exists():
        rows = {row["name"]: row for row in json.loads(path.read_text())["models"]}
    take = partial(in_a_process, module="benchmarks.training")
    for name in options.names or [case.name for case in CASES]:
        if options.again or name not in rows or rows[name]["failures"]:
            rows[name] = take(name)
            print(
                name,
                {w: f"{r:.2f}" for w, r in _ratios(rows[name]).items()},
                flush=True,
            )
            write(list(rows.values()), options.out)
    text = write(list(rows.values()), options.out)
    print(text)
    return int(any(row["failures"] for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
