"""`python -m benchmarks.ranking`: are placements ranked by prices as by the clock?

For each model and placement, the predicted time of one forward and backward stands
beside the time that they take.  The prices are those that `convert` uses on the device.
A pair of placements counts where the clock tells them apart, by the sign test of the
rounds; the prices are right about the pair if they have the same order.  Each model
runs in a process of its own; a finished one is skipped unless `--again`.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import autoamp
from autoamp.calibrate.clock import surely_less
from autoamp.place.policies import POLICIES

from . import report, step_times
from .metrics import ModelCase, to_device
from .ratios import Row
from .setting import Setting
from .step_times import CPU_BF16, Step, rounds
from .training import case_in, names, said_of_batches

STEM = "ranking"
PLACEMENTS = ("fp32", "optimal", *POLICIES)


def measured(name: str, setting: Setting) -> Row:
    """The seconds of each placement in each round, and the predicted seconds."""
    case = case_in(setting, name)
    predicted: dict[str, float] = {}

    def make(placement: str) -> Step:
        predicted[placement] = predicted_seconds(case, placement, setting)
        return call_of(case, placement, setting)

    makers = {placement: partial(make, placement) for placement in PLACEMENTS}
    row = step_times.measured(name, makers, setting)
    for placement, found in row["ways"].items():
        found["predicted"] = predicted[placement]
    return row


def call_of(case: ModelCase, placement: str, setting: Setting) -> Step:
    """A forward and backward of the model, with its ops placed so."""
    model = case.model().to(setting.device)
    batch = to_device(case.inputs(0), setting.device)
    if placement != "fp32":
        autoamp.convert(
            model,
            precision=setting.precision,
            placement=placement,
            strict=True,
        )

    def call() -> None:
        args, kwargs = copy.copy(batch)
        case.loss(model(*args, **kwargs)).backward()
        model.zero_grad(set_to_none=True)

    return call


def predicted_seconds(case: ModelCase, placement: str, setting: Setting) -> float:
    """The predicted seconds of the same call.

    Raises:
        RuntimeError: no time is predicted on the device.
    """
    args, kwargs = to_device(case.inputs(0), setting.device)
    options = {
        "precision": setting.precision,
        "placement": "optimal" if placement == "fp32" else placement,
    }
    model = case.model().to(setting.device)
    found = autoamp.explain(model, *args, options=options, **kwargs).headline
    seconds = found.seconds_fp32 if placement == "fp32" else found.seconds
    if seconds is None:
        message = f"no time is predicted in {setting.precision} on {setting.device}"
        raise RuntimeError(message)
    return seconds


def pairs(row: Row) -> tuple[int, int]:
    """Pairs of placements that prices order as the clock does, and all that count."""
    right = counted = 0
    for one, other in itertools.permutations(row["ways"].values(), 2):
        if surely_less(one["seconds"], other["seconds"]):
            counted += 1
            right += one["predicted"] < other["predicted"]
    return right, counted


def table(rows: Sequence[Row]) -> str:
    """Measured and predicted milliseconds of each placement, and the pairs."""
    lines = []
    for row in rows:
        cells = []
        for placement in PLACEMENTS:
            found = row["ways"].get(placement)
            if found is None:
                cells.append("failed")
                continue
            taken = 1e3 * statistics.median(found["seconds"])
            cells.append(f"{taken:.1f} / {1e3 * found['predicted']:.1f}")
        lines.append([row["name"], *cells, "{} of {}".format(*pairs(row))])
    right, counted = (sum(each) for each in zip((0, 0), *map(pairs, rows), strict=True))
    total = ["all", *("" for _ in PLACEMENTS), f"{right} of {counted}"]
    head = ("model", *(f"{placement}, ms" for placement in PLACEMENTS), "right pairs")
    return report.markdown(head, [*lines, total])


def brief(row: Row) -> str:
    """The pairs of a model in one line."""
    return "{} of {} pairs right".format(*pairs(row))


def write(rows: Sequence[Row], folder: Path, setting: Setting = CPU_BF16) -> str:
    """Writes the table and its rows to `folder`; returns the text."""
    note = f"""\
A forward and backward in {setting.precision}, measured / predicted: medians of \
{rounds(setting)} interleaved rounds, and the
predicted time by the prices that `convert` uses here. A pair of placements is right if
the prices order it as the clock does; pairs that the clock does not tell apart (sign
test, 5 %) do not count. {said_of_batches(setting)}"""
    return step_times.write_text(
        folder / setting.stem(STEM), rows, note, [table(rows)], setting
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked and not yet there; 1 if a placement of a model failed."""
    return step_times.run_anywhere(
        "benchmarks.ranking",
        arguments,
        names=names,
        measured=measured,
        write=write,
        brief=brief,
    )


if __name__ == "__main__":
    raise SystemExit(main())
