"""`python -m benchmarks.parallel`: tensor-parallel steps of two gloo processes.

A Llama whose linears are split by columns and rows, with its sequences whole or in
parts, in fp32, under autocast, and converted: times, and the bytes that a rank sends.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import autoamp
from tests.distributed.meshed import Llama
from tests.distributed.ranks import Ranks
from tests.distributed.traffic import wire

from . import report
from .report import Data, option
from .timing import interleaved, keep_freed_memory
from .ways import BF16

WORLD, WARM_UP, ROUNDS = 2, 3, 9
WAYS = ("fp32", "autocast", "autoamp bf16", "autoamp bf16, low sums")
LOW_SUMS = {"allow": ["autoamp::redistribute", "autoamp::from_local"]}

NOTE = """\
The kB that a rank of a ring sends in one training step{}. A Llama of {layers} layers,
{width} wide, {words:,} words, {batch} times {tokens} tokens; two gloo processes on one
machine, one thread each, SGD with momentum. "low sums" moves the sums over the ranks to
the low dtype (`allow=`), in which autocast makes only some of them."""


@dataclass(frozen=True)
class Size:
    """The size of the Llama and of a step."""

    layers: int
    width: int
    words: int
    tokens: int
    batch: int


TIMED = Size(4, 512, 4096, 128, 2)
COUNTED = Size(2, 64, 128, 32, 1)
"""For bytes alone, whose shares do not depend on the size."""


def step_of(way: str, size: Size, *, sequences: bool) -> Callable[[], None]:
    """One training step of one rank."""
    from transformers import LlamaConfig

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    config = LlamaConfig(
        hidden_size=size.width,
        intermediate_size=2 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        vocab_size=size.words,
    )
    model = Llama(mesh, sequences=sequences, config=config)
    if way.startswith("autoamp"):
        lists = LOW_SUMS if "low sums" in way else {}
        autoamp.convert(model, precision="bf16", do_no_harm=False, **lists)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, foreach=False)
    words = torch.randint(0, size.words, (size.batch, size.tokens))

    def step() -> None:
        low = way == "autocast"
        with torch.autocast("cpu", BF16) if low else contextlib.nullcontext():
            scores = model(words)
            loss = functional.cross_entropy(
                scores[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten()
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(_: int, size: Size, sequences: bool) -> dict[str, dict[str, float]]:
    """Seconds of a step (if timed) and kB sent in each of `WAYS`, on one rank."""
    keep_freed_memory()
    steps, sent = {}, {}
    for way in WAYS:
        steps[way] = step_of(way, size, sequences=sequences)
        for _ in range(WARM_UP):
            steps[way]()
        with wire(WORLD) as found:
            steps[way]()
        sent[way] = sum(size for _, size in found) / 1e3
        dist.barrier()
    if size != TIMED:
        return {"sent": sent}
    taken = interleaved(steps, ROUNDS)
    seconds = {way: statistics.median(times) for way, times in taken.items()}
    return {"seconds": seconds, "sent": sent}


def measure_all(given: argparse.Namespace) -> Data:
    """The figures of both layouts, from the first of two ranks."""
    size = COUNTED if given.bytes else TIMED
    found = {}
    for name, sequences in (("sequences whole", False), ("sequences in parts", True)):
        ranks = Ranks(WORLD)
        # The slowest rank is the step's time; both wait for each other.
        first, *_ = ranks.run(measure, size, sequences, deadline=600)
        ranks.close()
        found[name] = first
        print(f"{name}: {first}", flush=True)
    return {"found": found}


def text(data: Data) -> str:
    """The page, two rows for each layout of the model."""
    rows, timed = [], False
    for name, each in data["found"].items():
        seconds, sent = each.get("seconds"), each["sent"]
        traffic = [f"{sent[way]:.1f} ({sent[way] / sent['fp32']:.2f})" for way in WAYS]
        if seconds is not None:
            timed = True
            times = [f"{seconds[way] / seconds['autocast']:.2f}" for way in WAYS]
            rows.append([f"{name}: time, of autocast's", *times])
        rows.append([f"{name}: kB sent (of fp32's)", *traffic])
    said = f", and its time: the median of {ROUNDS} interleaved rounds" * timed
    note = NOTE.format(said, **asdict(TIMED if timed else COUNTED))
    return report.page(data, note, report.markdown(["", *WAYS], rows))


TABLE = report.Table(
    "parallel",
    measure_all,
    text,
    options=(
        option(
            "--bytes",
            False,
            "count bytes alone, as for a CPU without 16-bit units",
            action="store_true",
        ),
    ),
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
