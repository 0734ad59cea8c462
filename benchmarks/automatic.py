"""`python -m benchmarks.automatic`: what the automatic mode adds to a converted step.

Two copies of one model, one given to `convert`, the other met by the automatic mode,
stepped in turn; the patch of `nn.Module.__call__` is in place only for the latter.
Small models, where whatever a call costs shows most.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn

import autoamp

from . import report
from .capability import capability
from .peers import Peer, ready
from .timing import keep_freed_memory, seconds
from .workloads import Workload, workloads

OPTIONS: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
CONVERTED, AUTOMATIC = "convert", "automatic"
HEADER = ("workload", "rounds", "step ms", "automatic / convert", "quartiles")


def run(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, both ways."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    original = workload.build()
    plain = nn.Module.__call__
    autoamp.enable(**OPTIONS)
    calls = {CONVERTED: plain, AUTOMATIC: nn.Module.__call__}
    try:
        nn.Module.__call__ = plain  # type: ignore[method-assign]
        steps = {CONVERTED: _ready(workload, original, _convert)}
        nn.Module.__call__ = calls[AUTOMATIC]  # type: ignore[method-assign]
        steps[AUTOMATIC] = _ready(workload, original, lambda m: m)
        for _ in range(20):
            steps[AUTOMATIC]()
        taken: dict[str, list[float]] = {CONVERTED: [], AUTOMATIC: []}
        for turn in range(rounds):
            names = [*taken] if turn % 2 else [*taken][::-1]
            for name in names:
                nn.Module.__call__ = calls[name]  # type: ignore[method-assign]
                taken[name].append(_seconds(steps[name]))
        return taken
    finally:
        nn.Module.__call__ = calls[AUTOMATIC]  # type: ignore[method-assign]
        autoamp.disable()


def _seconds(step: Callable[[], None]) -> float:
    """The median of a few steps.

    After a few more: a new attribute of `nn.Module` empties Python's caches of the
    attributes of every class of modules.
    """
    for _ in range(3):
        step()
    return statistics.median(seconds(step, "cpu") for _ in range(5))


def _ready(
    workload: Workload, original: nn.Module, prepare: Callable[[nn.Module], nn.Module]
) -> Callable[[], None]:
    return ready(workload, original, Peer("", prepare), "cpu").step


def _convert(model: nn.Module) -> nn.Module:
    converted: nn.Module = autoamp.convert(model, **OPTIONS, strict=True)
    return converted


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked, prints the table and writes it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.automatic")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="workloads whose name holds this")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    wanted = [
        w for w in workloads(True) if w.kind == "training" and options.only in w.name
    ]
    kept = ", freed memory kept by malloc" if keep_freed_memory() else ""
    lines: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for workload in track(wanted, "training", transient=True):
        taken = run(workload, options.rounds)
        pairs = zip(taken[AUTOMATIC], taken[CONVERTED], strict=True)
        low, middle, high = statistics.quantiles([a / c for a, c in pairs], n=4)
        step = statistics.median(taken[CONVERTED]) * 1e3
        cells = [str(options.rounds), f"{step:.2f}", f"{middle:.3f}"]
        lines.append([workload.name, *cells, f"{low:.3f} to {high:.3f}"])
        results.append({"workload": workload.name, "seconds": taken})
        gc.collect()
    line = capability("cpu")
    note = f"{line}; bf16, small sizes, medians of interleaved rounds{kept}"
    text = "\n".join([note, "", report.markdown(HEADER, lines)]) + "\n"
    payload = {"capability": line, "results": results}
    report.write(options.out / "automatic-cpu", text, payload)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
