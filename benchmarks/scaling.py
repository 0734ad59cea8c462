"""`python -m benchmarks.scaling`: what loss scaling and its check cost in a step.

The same model in the same precision with a dynamic loss scale and with none, in turn,
so that all else is equal: bf16, because fp16 is emulated on most CPUs and would make
the rest of the step, and so the share, look better than it is.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn

import autoamp

from . import report
from .capability import capability
from .peers import Peer, ready
from .timing import interleaved, keep_freed_memory, seconds
from .workloads import Workload, workloads

SCALED, UNSCALED = "dynamic", "off"
ENOUGH_SECONDS, MOST_ROUNDS = 5.0, 300
"""A step of a few milliseconds is timed so often that its median means something."""

HEADER = ("workload", "kind", "rounds", "step ms", "scaled / unscaled", "quartiles")


def run(workload: Workload, rounds: int, device: str, low: str) -> dict[str, Any]:
    """Seconds of each step with and without scaling, and their ratio round by round."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    original = workload.build().to(device)
    steps: dict[str, Callable[[], None]] = {}
    for scale in (UNSCALED, SCALED):
        steps[scale] = ready(workload, original, _peer(scale, low), device).step
        for _ in range(3):  # captures, meets its optimizer, settles
            once = seconds(steps[scale], device)
    rounds = max(rounds, min(MOST_ROUNDS, int(ENOUGH_SECONDS / once)))
    taken = interleaved(steps, rounds, device)
    ratios = [s / u for s, u in zip(taken[SCALED], taken[UNSCALED], strict=True)]
    return {
        "rounds": rounds,
        "seconds": taken,
        "quartiles": statistics.quantiles(ratios, n=4),
    }


def _peer(loss_scale: str, low: str) -> Peer:
    def prepare(model: nn.Module) -> nn.Module:
        converted: nn.Module = autoamp.convert(
            model, precision=low, loss_scale=loss_scale, do_no_harm=False, strict=True
        )
        return converted

    return Peer(loss_scale, prepare)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked, prints the table and writes it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="workloads whose name holds this")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args(arguments)
    wanted = [
        w
        for w in workloads(options.quick)
        if w.kind != "inference" and options.only in w.name
    ]
    kept = keep_freed_memory()
    lines: list[list[str]] = []
    results: list[dict[str, Any]] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(wanted))
        for workload in wanted:
            progress.update(task, description=workload.name)
            found = run(workload, options.rounds, options.device, options.precision)
            low, middle, high = found["quartiles"]
            step = statistics.median(found["seconds"][UNSCALED]) * 1e3
            cells = [
                str(found["rounds"]),
                f"{step:.1f}",
                f"{middle:.3f}",
                f"{low:.3f} to {high:.3f}",
            ]
            lines.append([workload.name, workload.kind, *cells])
            results.append({"workload": workload.name, **found})
            progress.advance(task)
            gc.collect()
    line = capability(options.device)
    note = f"{line}; {options.precision}, medians of interleaved rounds"
    note += ", freed memory kept by malloc" if kept else ""
    note += ", small sizes" if options.quick else ""
    text = "\n".join([note, "", report.markdown(HEADER, lines)]) + "\n"
    stem = f"scaling-{options.device}" + ("-quick" if options.quick else "")
    report.write(options.out / stem, text, {"capability": line, "results": results})
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
