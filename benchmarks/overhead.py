"""`python -m benchmarks.overhead`: microseconds that a converted call takes by itself.

The model is so small that its kernels take next to no time: three linears of 16
features, with a GELU between each two, on 4 rows and one thread.  "bf16" is what a
converted model has to do at the least: the model in bfloat16, with a cast of its input
and of its result, captured by Dynamo with nothing rewritten.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

import autoamp

from . import report
from .report import Data
from .timing import interleaved, repeated
from .ways import BF16

CALLS = 300
"""Calls timed at once."""

ROUNDS = 15
WARM_UP = 20
WIDTH, ROWS = 16, 4
WAYS = ("fp32", "autocast", "bf16", "autoamp")
WHAT = ("inference", "forward of training", "forward and backward", "with SGD's step")

NOTE = f"""\
Microseconds of one call, the least of {ROUNDS} interleaved rounds of {CALLS} calls, one
thread: three linears of {WIDTH} features with GELUs between, {ROWS} rows. "fp32",
"autocast" and "bf16" are captured by `torch.compile(backend="eager")`; "bf16" has its
weights in bfloat16, and casts its input and its result."""


class _WithCasts(nn.Module):
    """A bfloat16 model with fp32 inputs and results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x.to(BF16)).float()
        return result


def mlp() -> nn.Sequential:
    """The model whose calls are timed."""
    first, second, third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), third)


def ready(way: str, model: nn.Module) -> nn.Module:
    """A copy of a model, ready to be called in one of `WAYS`."""
    own = copy.deepcopy(model)
    if way == "autoamp":
        return autoamp.convert(own, precision="bf16", do_no_harm=False)
    found = _WithCasts(own) if way == "bf16" else own
    return torch.compile(found, backend="eager")  # type: ignore[return-value]


def call_of(what: str, way: str, model: nn.Module) -> Callable[[], None]:
    """The call that is timed."""
    x, run = torch.randn(ROWS, WIDTH), ready(way, model)
    optimizer = torch.optim.SGD(run.parameters(), lr=1e-6, foreach=True)
    context = partial(torch.autocast, "cpu", BF16) if way == "autocast" else nullcontext

    def forward() -> Tensor:
        with context():
            result: Tensor = run(x)
        return result

    def call() -> None:
        if what == "inference":
            with torch.no_grad():
                forward()
        elif what == "forward of training":
            forward()
        else:
            forward().sum().backward()
            if what == "with SGD's step":
                optimizer.step()
            optimizer.zero_grad()

    return call


def microseconds(what: str) -> dict[str, float]:
    """The least time of a call in each of `WAYS`."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = mlp()
    calls = {way: call_of(what, way, model) for way in WAYS}
    for call in calls.values():
        repeated(call, WARM_UP)
    steps = {way: partial(repeated, call, CALLS) for way, call in calls.items()}
    taken = interleaved(steps, ROUNDS)
    return {way: min(times) / CALLS * 1e6 for way, times in taken.items()}


def measure(_: argparse.Namespace) -> Data:
    """The times of all calls."""
    torch.set_num_threads(1)
    return {"microseconds": {what: microseconds(what) for what in WHAT}}


def text(data: Data) -> str:
    """The page, a row for each of `WHAT`."""
    found = data["microseconds"].items()
    rows = [[what, *(f"{each[way]:.0f}" for way in WAYS)] for what, each in found]
    header = ["a call", *(f"{way}, us" for way in WAYS)]
    return report.page(data, NOTE, report.markdown(header, rows))


TABLE = report.Table("overhead", measure, text)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
