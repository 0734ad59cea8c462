"""Times of a step, way by way: measured in turn, and set beside autocast's."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import report
from .bars import grouped, svg
from .capability import capability
from .errors import Batch
from .metrics import ModelCase
from .processes import commit, commits, failures, fill, in_a_process, said
from .ratios import Row
from .timing import interleaved, keep_freed_memory, ratios

BASELINE = "autocast"
WARM_UP = 3
ROUNDS = 11

Prepared = tuple[nn.Module, Callable[[], AbstractContextManager[Any]], Batch]
"""The model to call, the context of its forward, and the batch it gets."""


Step = Callable[[], None]


def step_of(case: ModelCase, prepared: Prepared, batches: int = 1) -> Step:
    """A training step: forwards and backwards of `batches`, and a step of SGD."""
    model, context, batch = prepared
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, foreach=True)
    model.train()

    def step() -> None:
        for _ in range(batches):
            args, kwargs = copy.copy(batch)
            with context():
                output = model(*args, **kwargs)
            case.loss(output).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measured(name: str, steps: Mapping[str, Callable[[], Step]]) -> Row:
    """The seconds of each way in each round; a way that fails has its error instead.

    Args:
        steps: for each way the function that makes its step.
    """
    keep_freed_memory()
    row: Row = {"name": name, "commit": commit(), "ways": {}, "failures": {}}
    ready = {}
    for way, make in steps.items():
        try:
            torch.manual_seed(0)
            step = make()
            for _ in range(WARM_UP):
                step()
            ready[way] = step
        except Exception as error:  # noqa: BLE001 - the other ways are still timed
            row["failures"][way] = said(error)
    row["ways"] = {w: {"seconds": t} for w, t in interleaved(ready, ROUNDS).items()}
    return row


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


def _cell(found: Mapping[str, float], way: str) -> str:
    return f"{found[way]:.2f}" if way in found else "failed"


def write(
    stem: Path, rows: Sequence[Row], note: str, tables: Sequence[str], title: str
) -> str:
    """Writes tables as .md, rows as .json and a plot as .svg; returns the text."""
    head = f"{capability('cpu')}; commit {commits(rows)}"
    failed = failures(rows)
    parts = [head, "", note, *(line for each in tables for line in ("", each))]
    text = "\n".join([*parts, "", *failed]).rstrip() + "\n"
    report.write(stem, text, {"capability": capability("cpu"), "models": list(rows)})
    drawn = {row["name"]: shares(row) for row in rows if shares(row)}
    stem.with_suffix(".svg").write_text(svg([grouped(title, drawn)] if drawn else []))
    return text


def run(
    module: str,
    arguments: Sequence[str] | None,
    *,
    names: Sequence[str],
    measured: Callable[[str], Row],
    write: Callable[[Sequence[Row], Path], str],
    brief: Callable[[Row], str] = brief,
) -> int:
    """The command line of a benchmark; 1 if a way to run a model failed.

    Args:
        module: what `python -m` is given.
        names: the models measured where none is named.
        measured: measures one model, in this process.
        write: writes rows to a folder, and returns the table.
        brief: a row in one line, for the terminal.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("names", nargs="*", help="models (all)")
    parser.add_argument("--again", action="store_true", help="finished models too")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--one", metavar="NAME", help="one model, printed as JSON")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measured(options.one)))
        return 0
    stem = options.out / module.rpartition(".")[2]
    take = partial(in_a_process, module=module)
    wanted, again = options.names or names, options.again
    text = fill(wanted, stem, take=take, write=write, brief=brief, again=again)
    print(text)
    return int(
        bool(failures(json.loads(stem.with_suffix(".json").read_text())["models"]))
    )
