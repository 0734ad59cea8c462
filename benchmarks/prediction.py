"""`python -m benchmarks.prediction`: predicted times beside measured ones, on this CPU.

Each model runs in a process of its own.  The time predicted is that of forward and
backward of all graphs with the placement that `convert` chooses, and with every op in
fp32, by the figures that were measured on this machine; the time measured is that of
the same calls, the least of interleaved rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import autoamp

from .bytes_models import PAPER, WRITTEN, case_of
from .metrics import ModelCase
from .processes import commit
from .timing import interleaved

STEM = "prediction"
ROUNDS = 7
WAYS = ("fp32", "autocast", "autoamp")
CASES = (*PAPER, *WRITTEN)
HEADER = ("model", *(f"{w}: measured, ms | predicted | ratio" for w in WAYS))

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


def measured(name: str) -> dict[str, Any]:
    """The predicted seconds, and the least measured seconds, of each way."""
    case = case_of(name)
    args, kwargs = case.inputs(0)
    found = autoamp.explain(
        case.model().train(), *args, precision="bf16", **kwargs
    ).headline
    predicted = found.seconds_fp32, found.seconds_autocast, found.seconds
    ways = calls(case)
    for call in ways.values():
        call()
        call()
    times = interleaved(ways, ROUNDS)
    return {
        "name": name,
        "commit": commit(),
        "device": found.device,
        "predicted": dict(zip(WAYS, predicted, strict=True)),
        "measured": {way: min(each) for way, each in times.items()},
    }


def main() -> None:
    for name in __import__("sys").argv[1:]:
        r = measured(name)
        print(
            name,
            r["device"],
            {
                w: (
                    round(r["measured"][w] * 1e3, 1),
                    round(r["predicted"][w] * 1e3, 1),
                    round(r["predicted"][w] / r["measured"][w], 2),
                )
                for w in WAYS
            },
            flush=True,
        )


if __name__ == "__main__":
    main()
