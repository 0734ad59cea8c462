"""`python -m benchmarks.scaling`: what loss scaling and its check cost in a step.

The same model in the same precision with a dynamic loss scale and with none, in turn,
so that all else is equal: bf16, because fp16 is emulated on most CPUs and would make
the rest of the step, and so the share, look better than it is.
"""

from __future__ import annotations

import argparse
import gc
import statistics

import torch
from rich.progress import track

from . import report
from .models import Workload, workloads
from .report import Data, option
from .setting import Setting
from .timing import interleaved, keep_freed_memory, quartiles, seconds
from .ways import Step, prepared, step_of

SCALED, UNSCALED = "dynamic", "off"
ENOUGH_SECONDS, MOST_ROUNDS = 5.0, 300
"""A step of a few milliseconds is timed so often that its median means something."""

HEADER = ("workload", "kind", "rounds", "step ms", "scaled / unscaled", "quartiles")


def run(workload: Workload, rounds: int, setting: Setting) -> Data:
    """Seconds of each step with and without scaling, and their ratio round by round."""
    torch._dynamo.reset()
    steps: dict[str, Step] = {}
    for scale in (UNSCALED, SCALED):
        torch.manual_seed(0)
        ready = prepared(workload.case, "autoamp", setting, loss_scale=scale)
        steps[scale] = step_of(workload.case, ready, workload.steps)
        for _ in range(3):  # captures, meets its optimizer, settles
            once = seconds(steps[scale], setting.device)
    rounds = max(rounds, min(MOST_ROUNDS, int(ENOUGH_SECONDS / once)))
    taken = interleaved(steps, rounds, setting.device)
    parts = quartiles(taken[SCALED], taken[UNSCALED])
    return {"rounds": rounds, "seconds": taken, "quartiles": parts}


def measure(given: argparse.Namespace) -> Data:
    """The figures of the training workloads that are asked for."""
    kept = keep_freed_memory()
    setting = Setting(given.device, given.precision)
    wanted = [w for w in workloads(given.quick) if given.only in w.name]
    results = []
    for workload in track(wanted, "scaling", transient=True):
        if workload.kind != "inference":
            found = run(workload, given.rounds, setting)
            results.append({"workload": workload.name, "kind": workload.kind, **found})
            gc.collect()
    note = f"{given.precision}, medians of interleaved rounds"
    note += ", freed memory kept by malloc" if kept else ""
    note += ", small sizes" if given.quick else ""
    return {"note": note, "results": results}


def text(data: Data) -> str:
    """The page."""
    lines = []
    for each in data["results"]:
        low, middle, high = each["quartiles"]
        step = statistics.median(each["seconds"][UNSCALED]) * 1e3
        cells = [str(each["rounds"]), f"{step:.1f}", f"{middle:.3f}"]
        kind = each.get("kind") or _kind(each["workload"])
        lines.append([each["workload"], kind, *cells, f"{low:.3f} to {high:.3f}"])
    return report.page(data, report.markdown(HEADER, lines))


def _kind(name: str) -> str:
    """The kind of a workload of whose row it was not kept."""
    return next(w.kind for w in workloads(False) if w.name == name)


TABLE = report.Table(
    "scaling",
    measure,
    text,
    options=(
        report.QUICK,
        option("--device", "cpu", choices=("cpu", "cuda")),
        option("--precision", "bf16", choices=("bf16", "fp16")),
        report.rounds(15),
        report.ONLY,
    ),
    stem=lambda given: f"scaling-{given.device}{'-quick' * given.quick}",
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
