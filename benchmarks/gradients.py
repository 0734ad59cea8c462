"""`python -m benchmarks.gradients`: fp16 gradient error, ours against GradScaler's.

Each test model, the same batches and the same loss scale: under `torch.autocast` with
the loss scaled as `torch.amp.GradScaler` does, and converted.  Errors are relative to
fp32, over all parameters together, root mean square over the batches.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch
from rich.progress import track

import autoamp

from . import report
from .errors import (
    Step,
    has_finite_grads,
    output_and_grad_errors,
    scaled_step,
    training_step,
)
from .metrics import SEEDS, ModelCase
from .report import Data

SCALES = (2.0**15, 2.0**12, 2.0**9, 1.0)
"""The first at which no gradient overflows, either way, is the one compared at."""

HEADER = ("model", "loss scale", "autoamp", "GradScaler", "ratio")


def compare(case: ModelCase) -> dict[str, Any]:
    """The two errors of one model, and the scale they were measured at."""
    exact = [_step(case, seed, 1.0, way="fp32") for seed in SEEDS]
    for scale in SCALES:
        found = {
            way: [_step(case, seed, scale, way=way) for seed in SEEDS]
            for way in ("autoamp", "GradScaler")
        }
        if all(has_finite_grads(step) for steps in found.values() for step in steps):
            break
    errors = {w: output_and_grad_errors(s, exact)[1] for w, s in found.items()}
    return {"model": case.name, "loss scale": scale, **errors}


def _step(case: ModelCase, seed: int, scale: float, *, way: str) -> Step:
    torch._dynamo.reset()
    model, batch = case.model(0), case.inputs(seed)
    if way == "fp32":
        return training_step(model, case.loss, batch)
    if way == "autoamp":
        options: dict[str, Any] = {"precision": "fp16", "loss_scale": scale}
        model = autoamp.convert(model, **options, do_no_harm=False, strict=True)
        return training_step(model, case.loss, batch)

    region = partial(torch.autocast, "cpu", torch.float16)
    return scaled_step(model, case.loss, batch, scale, context=region)


def measure(given: argparse.Namespace) -> Data:
    """The errors of the cases of tests/models that are asked for."""
    from tests.models import BY_NAME

    rows, failures = [], []
    for name in track([n for n in BY_NAME if given.only in n], "gradients"):
        try:
            rows.append(compare(BY_NAME[name]))
        except RuntimeError as error:  # torch has no fp16 kernel for it
            failures.append(f"{name}: {str(error).splitlines()[0]}")
    note = f"fp16, {len(SEEDS)} batches"
    return {"note": note, "results": rows, "failures": failures}


def text(data: Data) -> str:
    """The page."""
    cells = []
    for row in data["results"]:
        ratio = row["autoamp"] / row["GradScaler"] if row["GradScaler"] else math.nan
        both = [f"{row[way]:.2e}" for way in ("autoamp", "GradScaler")]
        cells.append([row["model"], f"{row['loss scale']:g}", *both, f"{ratio:.2f}"])
    failed = "\n".join(f"- {each}" for each in data["failures"])
    told = ["Not comparable:", failed] * bool(failed)
    return report.page(data, report.markdown(HEADER, cells), *told)


TABLE = report.Table(
    "gradients",
    measure,
    text,
    options=(report.ONLY,),
    stem=lambda _: "gradients-cpu",
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
