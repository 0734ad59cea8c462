"""`python -m benchmarks.prediction`: predicted times beside measured ones.

Each model runs in a process of its own.  Predicted is the time of forward and backward
of all graphs by the prices that `convert` uses here, with every op in fp32, with the
ops placed as `torch.autocast` places them, and as `convert` does; the time measured is
that of the same calls, the least of interleaved rounds.  Prices that are right about a
pair of ways have the same order as the clock.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from functools import partial

import autoamp

from . import processes, report, turns
from .metrics import ModelCase, to_device
from .processes import Row, new_row
from .setting import Setting
from .step_times import QUICK_ROUNDS, interleaved
from .training import case_in, in_one_batch
from .ways import CPU_BF16, Prepared, Step, prepared

ROUNDS = 9
WAYS = ("fp32", "autocast", "autoamp")
HEADER = ("model", *(f"{way}: ms, predicted, ratio" for way in WAYS), "pairs in order")
WITHIN = 0.3

NOTE = """\
Forward and backward in {precision}: the time measured, the time predicted {by}, and \
the ratio of the two. "Pairs in order": of the
pairs of ways whose measured times differ by 5 % or more, those whose predicted times
are in the same order. Least of {rounds} interleaved rounds."""


def _forward_and_backward(case: ModelCase, ready: Prepared) -> None:
    case.loss(ready.forward()).backward()
    ready.model.zero_grad(set_to_none=True)


def measured(name: str, setting: Setting = CPU_BF16) -> Row:
    """The predicted seconds, and the least measured seconds, of each way.

    Raises:
        RuntimeError: no time is predicted on the device.
    """
    case = case_in(setting, name)
    args, kwargs = to_device(case.inputs(0), setting.device)
    options = {"precision": setting.precision}
    model = case.model().to(setting.device)
    found = autoamp.explain(model, *args, **options, kwargs=kwargs).headline
    predicted = found.seconds_fp32, found.seconds_autocast, found.seconds
    if None in predicted:
        message = f"no time is predicted in {setting.precision} on {setting.device}"
        raise RuntimeError(message)
    as_by_default = {"do_no_harm": True, "strict": False}
    calls: dict[str, Step] = {
        way: partial(
            _forward_and_backward, case, prepared(case, way, setting, **as_by_default)
        )
        for way in WAYS
    }
    for call in calls.values():
        call()
        call()
    if turns.wait():
        for call in calls.values():  # their memory went back to the device
            call()
    times = interleaved(calls, _rounds(setting), setting.device)
    ways = {
        way: {"predicted": seconds, "seconds": min(times[way])}
        for way, seconds in zip(WAYS, predicted, strict=True)
    }
    return new_row(name, device=found.device, ways=ways)


def _rounds(setting: Setting) -> int:
    return QUICK_ROUNDS if setting.quick else ROUNDS


def brief(row: Row) -> str:
    """The ratios of a row in one line."""
    return ", ".join(f"{way} {ratio:.2f}" for way, ratio in _ratios(row).items())


def _ratios(row: Row) -> dict[str, float]:
    return {w: each["predicted"] / each["seconds"] for w, each in row["ways"].items()}


def ordered(row: Row) -> tuple[int, int]:
    """Pairs of ways that are predicted in the order measured, and all such pairs."""
    right = every = 0
    for one, other in itertools.combinations(row["ways"].values(), 2):
        ratio = one["seconds"] / other["seconds"]
        if 0.95 < ratio < 1 / 0.95:
            continue
        every += 1
        right += (one["predicted"] < other["predicted"]) == (ratio < 1)
    return right, every


def text(rows: Sequence[Row], setting: Setting, machine: str) -> str:
    """The page."""
    lines = [
        [row["name"], *(_cell(row, w) for w in WAYS), "{} of {}".format(*ordered(row))]
        for row in rows
    ]
    off = [ratio for row in rows for ratio in _ratios(row).values()]
    near = sum(1 - WITHIN <= ratio <= 1 + WITHIN for ratio in off)
    right, every = (sum(each) for each in zip((0, 0), *map(ordered, rows), strict=True))
    mean = f"{statistics.geometric_mean(off):.2f}" if off else "unknown"
    said = (
        f"{near} of {len(off)} predictions are within {WITHIN:.0%}, the geometric mean "
        f"of the ratios is {mean}; {right} of {every} pairs are in order."
    )
    by = "from the speeds of\nthis machine (`autoamp calibrate`)"
    if setting.device != "cpu":
        by = "by the prices that\n`convert` uses on this device"
    note = NOTE.format(precision=setting.precision, by=by, rounds=_rounds(setting))
    return processes.page(rows, machine, note, report.markdown(HEADER, lines), said)


def _cell(row: Row, way: str) -> str:
    found = row["ways"].get(way)
    if found is None:
        return "failed"
    taken, predicted = 1e3 * found["seconds"], 1e3 * found["predicted"]
    return f"{taken:.0f}, {predicted:.0f}, {predicted / taken:.2f}"


TABLE = processes.ModelTable("prediction", in_one_batch, measured, text, brief)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
