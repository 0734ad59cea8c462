"""`python -m benchmarks.automatic`: what the automatic mode adds to a converted step.

Two copies of one model, one given to `convert`, the other met by the automatic mode,
stepped in turn; the patch of `nn.Module.__call__` is in place only for the latter.
Small models, where whatever a call costs shows most.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track
from torch import nn

import autoamp

from . import report
from .models import Workload, workloads
from .report import Data
from .timing import keep_freed_memory, quartiles, repeated, seconds
from .ways import Step, prepared, step_of

OPTIONS: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
CONVERTED, AUTOMATIC = "convert", "automatic"
HEADER = ("workload", "rounds", "step ms", "automatic / convert", "quartiles")


def run(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, both ways."""
    torch._dynamo.reset()
    plain = nn.Module.__call__
    autoamp.enable(**OPTIONS)
    calls = {CONVERTED: plain, AUTOMATIC: nn.Module.__call__}

    def step(way: str) -> Step:
        torch.manual_seed(0)
        _use(calls[way])
        # What is not converted here is converted by the automatic mode.
        ready = prepared(workload.case, "autoamp" if way == CONVERTED else "fp32")
        return step_of(workload.case, ready)

    try:
        steps = {way: step(way) for way in calls}
        repeated(steps[AUTOMATIC], 20)
        taken: dict[str, list[float]] = {CONVERTED: [], AUTOMATIC: []}
        for turn in range(rounds):
            for name in [*taken] if turn % 2 else [*taken][::-1]:
                _use(calls[name])
                taken[name].append(_seconds(steps[name]))
        return taken
    finally:
        _use(calls[AUTOMATIC])
        autoamp.disable()


def _use(call: Callable[..., Any]) -> None:
    nn.Module.__call__ = call  # type: ignore[method-assign]


def _seconds(step: Step) -> float:
    """The median of a few steps.

    After a few more: a new attribute of `nn.Module` empties Python's caches of the
    attributes of every class of modules.
    """
    repeated(step, 3)
    return statistics.median(seconds(step, "cpu") for _ in range(5))


def measure(given: argparse.Namespace) -> Data:
    """The figures of small training workloads."""
    kept = ", freed memory kept by malloc" if keep_freed_memory() else ""
    results = []
    for workload in track(workloads(True), "training", transient=True):
        if workload.kind == "training" and given.only in workload.name:
            taken = run(workload, given.rounds)
            results.append({"workload": workload.name, "seconds": taken})
            gc.collect()
    note = f"bf16, small sizes, medians of interleaved rounds{kept}"
    return {"note": note, "results": results}


def text(data: Data) -> str:
    """The page."""
    lines = []
    for each in data["results"]:
        ours, theirs = each["seconds"][AUTOMATIC], each["seconds"][CONVERTED]
        low, middle, high = quartiles(ours, theirs)
        step = statistics.median(theirs) * 1e3
        cells = [str(len(ours)), f"{step:.2f}", f"{middle:.3f}"]
        lines.append([each["workload"], *cells, f"{low:.3f} to {high:.3f}"])
    return report.page(data, report.markdown(HEADER, lines))


TABLE = report.Table(
    "automatic",
    measure,
    text,
    options=(report.rounds(60), report.ONLY),
    stem=lambda _: "automatic-cpu",
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
