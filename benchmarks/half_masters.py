"""`python -m benchmarks.half_masters`: half weights with masters, split or whole."""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics as pydoc_topics
from statistics import mean, median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import autoamp
from autoamp.tools.bench_memory import Held
from autoamp.training.meter import METERS, UpdateMeter, shares_of

from . import report
from .report import Data, markdown, option
from .timing import interleaved, keep_freed_memory, ratios, seconds

FP32, PLAIN, WHOLE, SPLIT = "fp32", "plain bf16", "fp32 masters", "split masters"
RATE, OTHER_RATES, SEEDS, FEW = 3e-5, (1e-5, 1e-4), 5, 1
PRETRAINING, STEPS, BATCH, CONTEXT = 2000, 500, 4, 64
ROUNDS, WARM_UP, METERED_S = 7, 2, 60.0
SIZES = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 192, "n_layer": 3}
SMALL = GPT2Config(n_head=4, bos_token_id=0, eos_token_id=0, **SIZES)
"""A GPT of 1.4 M weights that reads bytes."""


def with_masters(model: nn.Module, optimizer: Any, way: str) -> None:
    """Gives an optimizer the masters of a way, and a meter where it has none."""
    if way == PLAIN:
        UpdateMeter(optimizer)
    elif way != FP32:
        autoamp.convert(model, optimizer, masters="fp32" if way == WHOLE else "split")


@cache
def texts() -> tuple[Tensor, ...]:
    """Bytes: of the standard library; of the reference; of its topics held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for f in folder.glob("*.py") if "_sysconfigdata" not in f.name)
    topics = [pydoc_topics[name].encode() for name in sorted(pydoc_topics)]
    train = [text for i, text in enumerate(topics) if i % 5 != 4]
    parts = [file.read_bytes() for file in files], train, topics[4::5]
    return tuple(torch.tensor(list(b"".join(part))) for part in parts)


def batches(text: Tensor, size: int, seed: int, steps: int) -> Tensor:
    """Parts of a text at random places, (steps, size, CONTEXT)."""
    generator = torch.Generator().manual_seed(seed)
    places = len(text) - CONTEXT, (steps, size, 1)
    return text[torch.randint(*places, generator=generator) + torch.arange(CONTEXT)]


def take_step(model: nn.Module, optimizer: Any, ids: Tensor) -> float:
    """A step of training; the seconds of the optimizer's part."""
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return seconds(optimizer.step, "cpu")


@torch.no_grad()
def held_out_loss(weights: dict[str, Tensor]) -> float:
    """The loss in nats a byte, with the weights cast to fp32, on the held-out text."""
    model = GPT2LMHeadModel(SMALL).eval()
    model.load_state_dict({name: each.float() for name, each in weights.items()})
    ids = texts()[2].unfold(0, CONTEXT, CONTEXT)
    return float(model(input_ids=ids, labels=ids).loss)


def pretrained(path: str) -> Data:
    """Trains a GPT in fp32 on Python's source, and writes its weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(SMALL).eval()  # without dropout
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, PRETRAINING)
    for ids in batches(texts()[0], 2 * BATCH, 0, PRETRAINING):
        take_step(model, optimizer, ids)
        rate.step()
    torch.save(model.state_dict(), path)
    return {"loss": held_out_loss(model.state_dict()), "moved": 0.0, "updates": {}}


def finetuned(path: str, way: str, rate: float, seed: int) -> Data:
    """One fine-tuning, on one thread: AdamW, constant rate, one order of the data."""
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(SMALL).eval()  # without dropout
    model.load_state_dict(torch.load(path))
    model.to(torch.float32 if way == FP32 else torch.bfloat16)
    norms = [m.weight for m in model.modules() if isinstance(m, nn.LayerNorm)]
    before = torch.cat([w.detach().clone() for w in norms])
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    with_masters(model, optimizer, way)
    for ids in batches(texts()[1], BATCH, seed, STEPS):
        take_step(model, optimizer, ids)
    moved = torch.cat([w.detach() for w in norms]) != before
    return {
        "loss": held_out_loss(model.state_dict()),
        "moved": moved.float().mean().item(),
        "updates": {each.kind: each.share for each in shares_of(model)},
    }


def training() -> Data:
    """A GPT of 1.4 M weights learns Python's standard library in fp32, then Python's
    language reference in 500 steps of AdamW: the loss on held-out text, nats a byte,
    with the weights cast to fp32, over 5 orders of the data (1 at the other rates).
    "Updates made" is the share that a step in bf16 makes, by the meter of then."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "pretrained.pt"))
        # Whole masters are the split ones to the bit: tests/training/test_split.py.
        jobs = [
            (path, way, rate, seed)
            for rate in (RATE, *OTHER_RATES)
            for way in (FP32, PLAIN, SPLIT)
            for seed in range(SEEDS if rate == RATE else FEW)
        ]
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            start = pool.submit(pretrained, path).result()
            found = [*pool.map(finetuned, *zip(*jobs, strict=True))]
    runs: dict[str, list[Data]] = {"before, fp32": [start]}
    for (_, way, rate, _), run in zip(jobs, found, strict=True):
        runs.setdefault(f"{rate:g}, {way}", []).append(run)
    rows = []
    for name, group in runs.items():
        losses, moved = ([run[key] for run in group] for key in ("loss", "moved"))
        told = {"mean": mean(losses), "least": min(losses), "most": max(losses)}
        row: Data = {what: round(loss, 4) for what, loss in told.items()}
        row["norm weights moved"] = f"{mean(moved):.0%}"
        for kind in ("norm", "embedding", "other", "bias"):
            shares = [run["updates"][kind] for run in group if run["updates"]]
            row[f"{kind}: updates made"] = f"{mean(shares):.0%}" if shares else ""
        rows.append({"rate, way": name, **row})
    return {"rows": rows, "runs": runs}


class Way:
    """GPT-2 with 6 layers in bf16, trained one way by AdamW."""

    def __init__(self, way: str, fused: bool | None = None, length: int = 128) -> None:
        self.model = GPT2LMHeadModel(GPT2Config(n_layer=6)).bfloat16()
        weights = self.model.parameters()
        self.optimizer = torch.optim.AdamW(weights, RATE, fused=fused)
        with_masters(self.model, self.optimizer, way)
        self.ids = torch.randint(0, 50257, (4, length))
        self.alone: list[float] = []

    def step(self) -> None:
        self.alone.append(take_step(self.model, self.optimizer, self.ids))


def unmetered(way: Way) -> None:
    """Takes away the meter, which looks at some steps only."""
    if way.optimizer in METERS:
        METERS[way.optimizer].remove()


def memory() -> Data:
    """Bytes a weight of GPT-2 with 6 layers (82 M weights, 38.6 M of them in one
    embedding): held before a step of the optimizer, and what the step holds besides."""
    rows = []
    for fused, name in product((None, True), (PLAIN, WHOLE, SPLIT)):
        held, way = Held(torch.device("cpu")), Way(name, fused, 2)
        unmetered(way)
        way.step()  # leaves the gradients, which another step may use
        params = [*way.model.parameters()]
        states = [s for each in way.optimizer.state.values() for s in each.values()]
        grads = [p.grad for p in params if p.grad is not None]
        kinds = {"weights": params, "gradients": grads, "state": states}
        sizes = {kind: sum(t.nbytes for t in kinds[kind]) for kind in kinds}
        before, most = held.more(), held.peak(way.optimizer.step) or 0
        sizes["masters"] = before - sum(sizes.values())
        sizes |= {"in a step besides": most - before, "most": most}
        each = sum(p.numel() for p in params)
        row = {part: round(size / each, 2) for part, size in sizes.items()}
        rows.append({"way": f"fused={fused}, {name}", **row})
        del way, params, states, grads, kinds
    return {"rows": rows}


def times() -> Data:
    """That GPT-2 on 4 x 128 tokens: medians of interleaved rounds, and of the ratios of
    each round. Other programs ran on the machine meanwhile."""
    keep_freed_memory()
    rows, found = [], {}
    for fused in (None, True):
        ways = {way: Way(way, fused) for way in (PLAIN, WHOLE, SPLIT)}
        unmetered(ways[PLAIN])
        steps = {way: each.step for way, each in ways.items()}
        interleaved(steps, WARM_UP)
        found[f"fused={fused}, training step"] = interleaved(steps, ROUNDS)
        alone = {way: each.alone[-ROUNDS:] for way, each in ways.items()}
        found[f"fused={fused}, optimizer's part"] = alone
    for what, taken in found.items():
        told = {f"{way}, ms": round(median(s) * 1e3) for way, s in taken.items()}
        for base in (PLAIN, WHOLE):
            told[f"split / {base}"] = round(ratios(taken, base)[SPLIT], 2)
        rows.append({"": what, **told})
    return {"rows": rows, "seconds": found}


def meter() -> Data:
    """The share of the time of training this GPT-2 that the meter takes, by a clock
    round each of its calls."""
    rows, calls = [], list[float]()

    def timed(hook: Callable[..., None]) -> Any:
        return lambda *args: calls.append(seconds(partial(hook, *args), "cpu"))

    before, after = timed(UpdateMeter._before), timed(UpdateMeter._after)
    with mock.patch.multiple(UpdateMeter, _before=before, _after=after):
        way = Way(PLAIN)
        way.step()
        calls.clear()
        begin = time.perf_counter()
        while (spent := time.perf_counter() - begin) < METERED_S:
            way.step()
        told = {"longest call, ms": round(max(calls) * 1e3, 1)}
        told |= {"steps": len(way.alone) - 1, "seconds": round(spent)}
        rows.append({"way": PLAIN, **told, "share": f"{sum(calls) / spent:.2%}"})
    return {"rows": rows}


PARTS = {part.__name__: part for part in (training, memory, times, meter)}


def measure(given: argparse.Namespace) -> Data:
    """The figures of one part beside those there are, or of all parts."""
    path = given.out / "half_masters.json"
    found = json.loads(path.read_text()) if given.part and path.exists() else {}
    for part in [given.part] if given.part else PARTS:
        found[part] = {"commit": report.commit(), **PARTS[part]()}
    return {part: found[part] for part in PARTS if part in found}


def text(data: Data) -> str:
    """The page: a note and a table for each part."""
    told = []
    for part in [each for each in PARTS if each in data]:
        rows = [[*map(str, row.values())] for row in data[part]["rows"]]
        note = " ".join(str(PARTS[part].__doc__).split())
        told.append(f"{note} Commit {data[part]['commit']}.")
        told.append(markdown([*data[part]["rows"][0]], rows))
    return report.page(data, *told)


ONE = option("--part", None, "measures one part alone", choices=[*PARTS])
TABLE = report.Table("half_masters", measure, text, options=(ONE,))

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
