"""`python -m benchmarks.calibration`: does measuring again give the same placements?

The speeds of this CPU are measured anew again and again, on an idle machine and beside
processes that multiply matrices without end.  With the figures of each measurement the
graphs of every model are placed; the placements of one model are then compared.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from rich.progress import track

import autoamp
from autoamp.passes.decide.assign import assign
from autoamp.passes.decide.cost import price_graph
from autoamp.passes.decide.devices import Device, device_of
from autoamp.passes.record import Rewritten
from autoamp.passes.speeds.speeds import NoTimeError, device_from, measured

from . import report
from .decoding import one_token
from .models import PAPER, WRITTEN
from .report import Data, option

CPU, LOW = torch.device("cpu"), torch.bfloat16
SPINS = "import torch\nx = torch.ones(400, 400)\nwhile True: x @ x"
HEADER = (
    "model",
    "float ops",
    "idle: placements",
    "ops that differ",
    "busy: placements",
    "ops that differ",
    "table: ops that differ from idle",
)

NOTE = """\
The speeds of this CPU measured {times} times while idle, and {times} times beside two
processes that multiply matrices. Placements: how many different ones came of these
measurements, where a measurement that was given up counts as the table's figures.
Ops that differ: the float ops that do not have one precision in all of them. The last
column holds the table's placement against that of the first idle measurement."""


def graphs() -> dict[str, list[Rewritten]]:
    """The captured graphs of each model: training steps, and one token of a GPT-2."""
    found = {}
    for case in track((*PAPER, *WRITTEN), "capturing", transient=True):
        args, kwargs = case.inputs(0)
        model = case.model().train()
        told = autoamp.explain(model, *args, precision="bf16", kwargs=kwargs)
        found[case.name] = list(told.rewritten)
    model, args, kwargs = one_token()
    told = autoamp.explain(model, *args, precision="bf16", kwargs=kwargs)
    return found | {"gpt2, one token": list(told.rewritten)}


def placed(rewritten: Rewritten, device: Device) -> frozenset[str]:
    """The nodes that run low by the prices of a device."""
    prices = price_graph(
        rewritten.before,
        rewritten.classified,
        device,
        objective="time",
        do_no_harm=True,
        free_weights=True,
    )
    return assign(rewritten.classified, prices, "optimal").low


def calibrated() -> Device:
    """The device as measured now, or the table's where there is no time."""
    table = device_of(CPU, LOW)
    try:
        return device_from(measured(CPU, LOW), LOW, table, "measured")
    except NoTimeError:
        return table


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Two processes beside this one that never wait."""
    beside = [subprocess.Popen([sys.executable, "-c", SPINS]) for _ in range(2)]
    time.sleep(5)  # until torch is imported there
    try:
        yield
    finally:
        for each in beside:
            each.kill()
            each.wait()


def spread(
    graphs_of: Sequence[Rewritten], devices: Sequence[Device]
) -> tuple[int, int, int]:
    """Float ops; how many placements; the ops without one precision in all of them."""
    runs = [tuple(placed(each, device) for each in graphs_of) for device in devices]
    every = ((at, n) for run in runs for at, names in enumerate(run) for n in names)
    low = Counter(every)
    ops = {(at, n) for at, r in enumerate(graphs_of) for n in r.classified.verdicts}
    differ = sum(0 < low[key] < len(runs) for key in ops)
    return len(ops), len(set(runs)), differ


def measure(given: argparse.Namespace) -> Data:
    """The rows of all models, and how many measurements were given up."""
    captured = graphs()
    numbers = range(given.times)
    idle = [calibrated() for _ in track(numbers, "idle", transient=True)]
    with busy():
        loaded = [calibrated() for _ in track(numbers, "busy", transient=True)]
    given_up = [sum(d.name != "measured" for d in each) for each in (idle, loaded)]
    rows = []
    for name, graphs_of in captured.items():
        ops, *figures = spread(graphs_of, idle)
        by_table = spread(graphs_of, [device_of(CPU, LOW), idle[0]])[2]
        figures += [*spread(graphs_of, loaded)[1:], by_table]
        rows.append([name, str(ops), *map(str, figures)])
    return {"times": given.times, "given_up": given_up, "rows": rows}


def text(data: Data) -> str:
    """The page."""
    early, late = data["given_up"]
    told = (
        f"{early} of {data['times']} measurements on the idle machine and {late} on "
        "the busy one were given up, because readings did not agree."
    )
    note = f"{NOTE.format(times=data['times'])}\n{told}"
    return report.page(data, note, report.markdown(HEADER, data["rows"]))


TABLE = report.Table(
    "calibration",
    measure,
    text,
    options=(option("--times", 20, "measurements, idle and busy"),),
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
