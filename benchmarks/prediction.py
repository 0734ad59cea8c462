"""`python -m benchmarks.prediction`: predicted times beside measured ones.

Each model runs in a process of its own.  Predicted is the time of forward and backward
of all graphs by the prices that `convert` uses here, with every op in fp32, with the
ops placed as `torch.autocast` places them, and as `convert` does; the time measured is
that of the same calls, the least of interleaved rounds.  Prices that are right about a
pair of ways have the same order as the clock.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

import autoamp

from . import report, step_times, turns
from .bytes_models import PAPER, WRITTEN
from .metrics import ModelCase, to_device
from .processes import commit
from .ratios import Row
from .setting import Setting
from .step_times import CPU_BF16, QUICK_ROUNDS
from .timing import interleaved
from .training import case_in
from .training import names as names_in

STEM = "prediction"
ROUNDS = 9
WAYS = ("fp32", "autocast", "autoamp")
CASES = (*PAPER, *WRITTEN)
HEADER = ("model", *(f"{way}: ms, predicted, ratio" for way in WAYS), "pairs in order")
WITHIN = 0.3

NOTE = """\
Forward and backward in {precision}: the time measured, the time predicted {by}, and \
the ratio of the two. "Pairs in order": of the
pairs of ways whose measured times differ by 5 % or more, those whose predicted times
are in the same order. Least of {rounds} interleaved rounds."""

Call = Callable[[], None]


def names(setting: Setting) -> list[str]:
    """The models that are measured in a setting."""
    return names_in(setting) if setting.full_size else [case.name for case in CASES]


def calls(case: ModelCase, setting: Setting) -> dict[str, Call]:
    """Forward and backward of a model, run each way."""

    def call(model: nn.Module, *, autocast: bool) -> None:
        args, kwargs = copy.copy(batch)
        with torch.autocast(setting.device, setting.low, enabled=autocast):
            output = model(*args, **kwargs)
        case.loss(output).backward()
        model.zero_grad(set_to_none=True)

    batch = to_device(case.inputs(0), setting.device)
    plain = case.model().train().to(setting.device)
    converted = case.model().train().to(setting.device)
    autoamp.convert(converted, precision=setting.precision)
    return {
        "fp32": partial(call, plain, autocast=False),
        "autocast": partial(call, plain, autocast=True),
        "autoamp": partial(call, converted, autocast=False),
    }


def measured(name: str, setting: Setting = CPU_BF16) -> Row:
    """The predicted seconds, and the least measured seconds, of each way.

    Raises:
        RuntimeError: no time is predicted on the device.
    """
    case = case_in(setting, name)
    args, kwargs = to_device(case.inputs(0), setting.device)
    options = {"precision": setting.precision}
    model = case.model().train().to(setting.device)
    found = autoamp.explain(model, *args, options=options, **kwargs).headline
    predicted = found.seconds_fp32, found.seconds_autocast, found.seconds
    if None in predicted:
        message = f"no time is predicted in {setting.precision} on {setting.device}"
        raise RuntimeError(message)
    ways = calls(case, setting)
    for call in ways.values():
        call()
        call()
    if turns.wait():
        for call in ways.values():  # their memory went back to the device
            call()
    times = interleaved(ways, _rounds(setting), setting.device)
    return {
        "name": name,
        "commit": commit(),
        "device": found.device,
        "ways": {
            way: {"predicted": seconds, "seconds": min(times[way])}
            for way, seconds in zip(WAYS, predicted, strict=True)
        },
        "failures": {},
    }


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


def write(rows: Sequence[Row], folder: Path, setting: Setting = CPU_BF16) -> str:
    """Writes the table and its rows to `folder`; returns the text."""
    lines, off = [], []
    for row in rows:
        cells = [_cell(row, way) for way in WAYS]
        lines.append([row["name"], *cells, "{} of {}".format(*ordered(row))])
        off += _ratios(row).values()
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
    tables = [report.markdown(HEADER, lines), said]
    return step_times.write_text(
        folder / setting.stem(STEM), rows, note, tables, setting
    )


def _cell(row: Row, way: str) -> str:
    found = row["ways"].get(way)
    if found is None:
        return "failed"
    taken, predicted = 1e3 * found["seconds"], 1e3 * found["predicted"]
    return f"{taken:.0f}, {predicted:.0f}, {predicted / taken:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Times what is asked and not yet there; 1 if a way to run a model failed."""
    return step_times.run(
        "benchmarks.prediction",
        arguments,
        names=names,
        measured=measured,
        write=write,
        brief=brief,
    )


if __name__ == "__main__":
    raise SystemExit(main())
