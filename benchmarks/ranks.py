"""`python -m benchmarks.ranks`: training steps of two gloo processes.

DDP, and FSDP2 block by block, round the same model in fp32, under autocast, and
converted.  The bytes that FSDP gathers are counted in steps after the first three:
ranks agree on the low gathers in their second call.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.distributed.ranks import Ranks
from tests.distributed.traffic import counting

from . import report
from .models import case_of
from .report import Data
from .timing import interleaved, keep_freed_memory
from .ways import BF16

WORLD, WARM_UP, ROUNDS = 2, 4, 12
MODELS = {"gpt2": "GPT2Block", "llama": "LlamaDecoderLayer"}
"""Names of the models of `benchmarks.bytes`, and the class of their blocks."""

WRAPS = ("DDP", "FSDP2")
WAYS = ("fp32", "autocast", "autoamp bf16")

NOTE = f"""\
Median of {ROUNDS} interleaved rounds, as a share of autocast's time; and the MB that
one step gathers. Two gloo processes on one machine, one thread each, SGD with
momentum."""


def step_of(rank: int, name: str, wrap: str, way: str) -> Callable[[], None]:
    """One training step of one rank."""
    torch.manual_seed(0)
    case = case_of(name)
    model: nn.Module = case.model()
    if way.startswith("autoamp"):
        autoamp.convert(model, precision=way.split()[1], do_no_harm=False)
    if wrap == "DDP":
        model = DistributedDataParallel(model)
    else:
        for each in model.modules():
            if type(each).__name__ == MODELS[name]:
                fully_shard(each)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    args, kwargs = case.inputs(rank)

    def step() -> None:
        low = way == "autocast"
        with torch.autocast("cpu", BF16) if low else contextlib.nullcontext():
            loss = case.loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rank: int, name: str, wrap: str) -> dict[str, dict[str, float]]:
    """Seconds of a step and MB gathered of each of `WAYS`, on one rank."""
    keep_freed_memory()
    steps, gathered = {}, {}
    for way in WAYS:
        steps[way] = step_of(rank, name, wrap, way)
        for _ in range(WARM_UP - 1):
            steps[way]()
        with counting() as sizes:
            steps[way]()
        gathered[way] = sum(sizes) / 1e6
        dist.barrier()
    taken = interleaved(steps, ROUNDS)
    seconds = {way: statistics.median(times) for way, times in taken.items()}
    return {"seconds": seconds, "gathered": gathered}


def measure_all(_: argparse.Namespace) -> Data:
    """The figures of each model and wrapper, from the first of two ranks."""
    found = {}
    for name in MODELS:
        for wrap in WRAPS:
            ranks = Ranks(WORLD)
            # The slowest rank is the step's time; both wait for each other.
            first, *_ = ranks.run(measure, name, wrap, deadline=600)
            ranks.close()
            found[f"{name}, {wrap}"] = first
            print(f"{name}, {wrap}: {first}", flush=True)
    return {"found": found}


def text(data: Data) -> str:
    """The page, a row for each model and wrapper."""
    rows = []
    for name, each in data["found"].items():
        seconds, gathered = each["seconds"], each["gathered"]
        shares = [f"{seconds[way] / seconds['autocast']:.2f}" for way in WAYS]
        traffic = [f"{gathered[way]:.1f}" if gathered[way] else "" for way in WAYS[::2]]
        rows.append([name, f"{seconds['autocast'] * 1e3:.0f}", *shares, *traffic])
    header = ["", "autocast, ms", *WAYS, "gathered: fp32, MB", "autoamp bf16, MB"]
    return report.page(data, NOTE, report.markdown(header, rows))


TABLE = report.Table("ranks", measure_all, text)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
