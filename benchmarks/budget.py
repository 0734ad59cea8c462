"""Budgets for error on models of the zoo: `python -m benchmarks.budget [names]`.

Each model is converted to 1, 0.3 and 0.1 times autocast's error on three batches, the
last of which is held out, and then asked on two batches that it has never seen.  Errors
are measured.  Times are predicted as for `do_no_harm=False`, without the time to start
an op: the models are small, and that time would hide what a placement gains.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.progress import track

import autoamp
from autoamp.report.frontier import Frontier
from tests.models.case import Case
from tests.zoo import BY_NAME

from . import report
from .report import Data, option, said

MODELS = (
    "gpt2", "llama", "bert", "t5", "vit", "whisper", "mixtral", "gpt_neox", "opt",
    "distilbert", "bart", "deberta_v2", "swin", "convnextv2", "wav2vec2", "qwen3",
    "phi", "gemma2", "roberta", "clip",
)  # fmt: skip

FACTORS = (0.3, 1.0, 0.1)


@dataclass
class Row:
    """One model under one budget.

    Attributes:
        factor: the budget, in parts of autocast's error.
        predicted, measured, unseen: the largest share of the budget that an error
            takes: as predicted, on the batches of the calibration, on other batches.
        ratio: predicted over measured error, of the measure that is nearest to its
            limit, on the batches of the calibration; None where nothing runs low.
        given_up: the part of the default placement's speed-up that is given up; None
            where the default placement gains nothing.
        points: placements on the frontier.
        steps: seconds of the calibration in training steps of the model in fp32.
    """

    name: str
    factor: float
    predicted: float = 0.0
    measured: float = 0.0
    unseen: float = 0.0
    ratio: float | None = None
    given_up: float | None = None
    points: int = 0
    steps: float = 0.0
    error: str = ""


def measure(case: Case, factor: float) -> Row:
    """Converts one model within a budget, and asks it on batches it has not seen."""
    row = Row(case.name, factor)
    torch._dynamo.reset()
    model = case.model()
    batches = [case.inputs(seed) for seed in range(3)]
    text = f"{factor:g} autocast"
    budget = autoamp.Budget(outputs=text, gradients=text, loss_fn=case.loss)
    try:
        autoamp.convert(
            model,
            precision="bf16",
            do_no_harm=False,
            budget=budget,
            calibrate_on=batches,
        )
        args, kwargs = batches[0]
        model(*args, **kwargs)
        found = autoamp.report(model).frontier
        assert found is not None
        _fill(row, found, model, case)
    except autoamp.AutoampError as error:
        row.error = said(error)
    return row


def _fill(row: Row, found: Frontier, model: Any, case: Case) -> None:
    row.points = len(found.points)
    limits = found.limits
    row.predicted = max(found.point.errors.get(m, 0.0) / x for m, x in limits.items())
    row.measured = max(found.measured(m) / x for m, x in limits.items())
    near = max(limits, key=lambda m: found.measured(m) / limits[m])
    learned = [c.errors[near] for c in found.checks if not c.held_out]
    true = math.sqrt(statistics.fmean(e**2 for e in learned))
    row.ratio = found.point.errors.get(near, 0.0) / true if true else None
    slow, now = found.fp32.nanoseconds, found.point.nanoseconds
    fast = found.points[-1].nanoseconds
    if fast < 0.99 * slow:  # more than 1 % of fp32's time is saved
        row.given_up = (now - fast) / (slow - fast)
    row.steps = found.steps
    shares = []
    for seed in (100, 101):
        args, kwargs = case.inputs(seed)
        errors = autoamp.compare(model, *args, loss_fn=case.loss, kwargs=kwargs).errors
        shares.append(errors.output / limits["outputs"])
        shares.append(errors.gradients / limits["gradients"])
    row.unseen = max(shares)


# -- the table -------------------------------------------------------------------------

HEADER = (
    "model", "budget", "predicted", "measured", "unseen", "predicted / measured",
    "speed-up given up", "placements", "steps",
)  # fmt: skip


def _cells(row: Row) -> list[str]:
    start = [row.name, f"{row.factor:g}"]
    if row.error:
        return [*start, row.error, *[""] * 6]
    return [
        *start,
        *(f"{share:.2f}" for share in (row.predicted, row.measured, row.unseen)),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.given_up is None else f"{row.given_up:.0%}",
        str(row.points),
        f"{row.steps:.1f}",
    ]


def summary(rows: Sequence[Row]) -> list[str]:
    """Sentences on each budget."""
    told = []
    for factor in sorted(FACTORS, reverse=True):
        ran = [r for r in rows if r.factor == factor and not r.error]
        if not ran:
            continue
        within = sum(r.unseen <= 1 for r in ran)
        near = sum(0.5 <= r.ratio <= 2 for r in ran if r.ratio is not None)
        gave = [r.given_up for r in ran if r.given_up is not None]
        text = (
            f"* {factor:g} of autocast's error: unseen batches within the budget on "
            f"{within} of {len(ran)} models; the prediction within a factor of 2 on "
            f"{near}"
        )
        if gave:
            text += f"; median speed-up given up {statistics.median(gave):.0%}"
        told.append(f"{text}.")
    return told


WORDS = """Small models with random weights, in bf16, in training. Shares of the budget:
as predicted, as measured on the conversion's batches, and the largest on two batches
that the conversion has not seen. "predicted / measured" is of the error nearest to its
limit. "given up": the part of the fastest placement's gain over fp32 in predicted time
without launches. "steps": the time of learning and searching in training steps in fp32,
with other programs on the machine; the models are so small that Python takes most of
it."""


def text(data: Data) -> str:
    """The page: the rows, and below them what they come to."""
    rows = [Row(**row) for row in data["rows"]]
    table = report.markdown(HEADER, [_cells(row) for row in rows])
    return report.page(data, WORDS, table, "\n".join(summary(rows)))


def measure_all(given: argparse.Namespace) -> Data:
    """The rows of the models that are asked for, by model and budget."""
    names = given.names or MODELS
    rows: list[Row] = []
    wanted = [(name, factor) for factor in FACTORS for name in names]
    for name, factor in track(wanted, "models and budgets"):
        rows.append(measure(BY_NAME[name], factor))
        print(rows[-1], flush=True)
    rows.sort(key=lambda row: (names.index(row.name), -row.factor))
    return {"rows": [asdict(row) for row in rows]}


TABLE = report.Table(
    "budget",
    measure_all,
    text,
    options=(option("names", None, "models of the zoo (twenty)", nargs="*"),),
    keeps=lambda given: not given.names,
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
