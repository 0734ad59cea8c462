"""`python -m benchmarks.prediction`: predicted times beside measured ones, on this CPU.

Each model runs in a process of its own.  Predicted is the time of forward and backward
of all graphs by the speeds that were measured on this machine, with every op in fp32,
with the ops placed as `torch.autocast` places them, and as `convert` does; the time
measured is that of the same calls, the least of interleaved rounds.
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

from . import report, step_times
from .bytes_models import PAPER, WRITTEN, case_of
from .capability import capability
from .metrics import ModelCase
from .processes import commit, commits, failures
from .ratios import Row
from .timing import interleaved

STEM = "prediction"
ROUNDS = 9
WAYS = ("fp32", "autocast", "autoamp")
CASES = (*PAPER, *WRITTEN)
HEADER = ("model", *(f"{way}: ms, predicted, ratio" for way in WAYS), "pairs in order")
WITHIN = 0.3

NOTE = f"""\
Forward and backward in bf16: the time measured, the time predicted from the speeds of
this machine (`autoamp calibrate`), and the ratio of the two. "Pairs in order": of the
pairs of ways whose measured times differ by 5 % or more, those whose predicted times
are in the same order. Least of {ROUNDS} interleaved rounds."""

Call = Callable[[], None]


def calls(case: ModelCase) -> dict[str, Call]:
    """Forward and backward of a model, run each way."""

    def call(model: nn.Module, *, autocast: bool) -> None:
        args, kwargs = copy.copy(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(*args, **kwargs)
        case.loss(output).backward()
        model.zero_grad(set_to_none=True)

    batch = case.inputs(0)
    plain = case.model().train()
    converted = autoamp.convert(case.model().train(), precision="bf16")
    return {
        "fp32": partial(call, plain, autocast=False),
        "autocast": partial(call, plain, autocast=True),
        "autoamp": partial(call, converted, autocast=False),
    }


def measured(name: str) -> Row:
    """The predicted seconds, and the least measured seconds, of each way."""
    case = case_of(name)
    args, kwargs = case.inputs(0)
    options = {"precision": "bf16"}
    told = autoamp.explain(case.model().train(), *args, options=options, **kwargs)
    found = told.headline
    ways = calls(case)
    for call in ways.values():
        call()
        call()
    times = interleaved(ways, ROUNDS)
    predicted = found.seconds_fp32, found.seconds_autocast, found.seconds
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


def write(rows: Sequence[Row], folder: Path) -> str:
    """Writes the table and its rows to `folder`; returns the text."""
    lines, off = [], []
    pairs = [ordered(row) for row in rows]
    for row, (right, every) in zip(rows, pairs, strict=True):
        cells = [
            f"{1e3 * each['seconds']:.0f}, {1e3 * each['predicted']:.0f}, "
            f"{each['predicted'] / each['seconds']:.2f}"
            for each in row["ways"].values()
        ]
        lines.append([row["name"], *cells, f"{right} of {every}"])
        off += _ratios(row).values()
    near = sum(1 - WITHIN <= ratio <= 1 + WITHIN for ratio in off)
    right, every = (sum(each) for each in zip(*pairs, strict=True))
    said = (
        f"{near} of {len(off)} predictions are within {WITHIN:.0%}, the geometric mean "
        f"of the ratios is {statistics.geometric_mean(off):.2f}; {right} of {every} "
        "pairs are in order."
    )
    head = f"{capability('cpu')}; commit {commits(rows)}"
    parts = [head, "", NOTE, "", report.markdown(HEADER, lines), "", said]
    text = "\n".join([*parts, "", *failures(rows)]).rstrip() + "\n"
    kept = {"capability": capability("cpu"), "models": list(rows)}
    report.write(folder / STEM, text, kept)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Times what is asked and not yet there; 1 if a way to run a model failed."""
    return step_times.run(
        "benchmarks.prediction",
        arguments,
        names=[case.name for case in CASES],
        measured=measured,
        write=write,
        brief=brief,
    )


if __name__ == "__main__":
    raise SystemExit(main())
