"""`python -m benchmarks.half_masters`: bf16 weights with fp32 masters, split or whole.

A small GPT is trained in fp32 on the source of Python's standard library, then
fine-tuned on the language reference that Python's `help()` shows, in fp32 and in bf16.
The bytes and the times are those of GPT-2 with 6 layers.  `--part` measures one part
anew and keeps the figures of the others.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import autoamp
from autoamp.tools.bench_meters import Held
from autoamp.training.meter import METERS, UpdateMeter, shares_of

from . import report
from .report import Data, markdown, option
from .timing import interleaved, keep_freed_memory, ratios

FP32, PLAIN, WHOLE, SPLIT = "fp32", "plain bf16", "fp32 masters", "split masters"
NO_METER = "split masters, no meter"
RATE, OTHER_RATES, SEEDS, FEW = 3e-5, (1e-5, 1e-4), 5, 3
PRETRAINING, STEPS, BATCH, CONTEXT = 2000, 500, 4, 64
ROUNDS, WARM_UP, METERED_S = 7, 3, 60.0

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SMALL = GPT2Config(
    **{"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 192, "n_layer": 3},
    **{"n_head": 4, "bos_token_id": 0, "eos_token_id": 0, **NO_DROPOUT},
)
"""A GPT of 1.4 M weights that reads bytes."""


def with_masters(model: nn.Module, optimizer: Any, way: str) -> None:
    """Gives an optimizer the masters of a way, and a meter where it has none."""
    if way in (WHOLE, SPLIT, NO_METER):
        masters = "fp32" if way == WHOLE else "split"
        autoamp.convert(model, optimizer, masters=masters)
    elif way == PLAIN:
        UpdateMeter(optimizer)
    if way == NO_METER:
        METERS[optimizer].remove()


# -- fine-tuning -----------------------------------------------------------------------


@functools.cache
def source() -> Tensor:
    """The bytes of the modules in the top folder of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for f in folder.glob("*.py") if "_sysconfigdata" not in f.name)
    return codes(b"".join(file.read_bytes() for file in files))


@functools.cache
def reference() -> tuple[Tensor, Tensor]:
    """The bytes of Python's reference: to train on, and every fifth topic held out."""
    from pydoc_data.topics import topics

    texts = [topics[name].encode() for name in sorted(topics)]
    train = b"".join(text for i, text in enumerate(texts) if i % 5 != 4)
    return codes(train), codes(b"".join(texts[4::5]))


def codes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def windows(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[:, None] + torch.arange(CONTEXT)]


def batches(text: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        places = len(text) - CONTEXT, (batch,)
        yield windows(text, torch.randint(*places, generator=generator))


@torch.no_grad()
def held_out_loss(weights: dict[str, Tensor]) -> float:
    """The loss in nats a byte, with the weights cast to fp32, on the held-out text."""
    model = GPT2LMHeadModel(SMALL).eval()
    model.load_state_dict({name: each.float() for name, each in weights.items()})
    text = reference()[1]
    parts = windows(text, torch.arange(0, len(text) - CONTEXT, CONTEXT)).split(64)
    each = [model(input_ids=p, labels=p).loss.item() * len(p) for p in parts]
    return sum(each) / sum(map(len, parts))


def pretrained(path: str) -> None:
    """Writes the weights of a GPT that has learned to read Python's source."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, PRETRAINING)
    for _, ids in zip(
        range(PRETRAINING), batches(source(), 2 * BATCH, 0), strict=False
    ):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        rate.step()
    torch.save(model.state_dict(), path)


def finetuned(job: tuple[str, str, float, int]) -> Data:
    """One fine-tuning, on one thread: AdamW, constant rate, one order of the data."""
    path, way, rate, seed = job
    torch.set_num_threads(1)
    dtype = torch.float32 if way == FP32 else torch.bfloat16
    model = GPT2LMHeadModel(SMALL)
    model.load_state_dict(torch.load(path))
    model.to(dtype)
    norms = [m.weight for m in model.modules() if isinstance(m, nn.LayerNorm)]
    before = torch.cat([w.detach().clone() for w in norms])
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    with_masters(model, optimizer, way)
    order = batches(reference()[0], BATCH, seed)
    for _, ids in zip(range(STEPS), order, strict=False):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    moved = torch.cat([w.detach() for w in norms]) != before
    weights = model.state_dict()
    bits = b"".join(w.float().numpy().tobytes() for w in weights.values())
    found = {
        **{"way": way, "rate": rate, "seed": seed, "loss": held_out_loss(weights)},
        **{"norm_weights": len(moved), "norm_weights_moved": int(moved.sum())},
        "updates": {each.kind: each.share for each in shares_of(model)},
        "weights": hashlib.sha256(bits).hexdigest()[:12],
    }
    print(found, flush=True)
    return found


def training() -> Data:
    """The final losses of all ways at `RATE`, and of most at `OTHER_RATES`."""
    begin = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "pretrained.pt"))
        # Whole masters are the split ones to the bit, which the runs at `RATE` show.
        jobs = [
            (path, way, rate, seed)
            for rate in (RATE, *OTHER_RATES)
            for way in (FP32, PLAIN, SPLIT, *[WHOLE] * (rate == RATE))
            for seed in range(SEEDS if rate == RATE else FEW)
        ]
        with ProcessPoolExecutor(2, mp_context=spawn) as pool:
            pool.submit(pretrained, path).result()
            start = torch.load(path)
            runs = [*pool.map(finetuned, jobs)]
    losses = {
        "loss_before": held_out_loss(start),
        "loss_rounded": held_out_loss({n: w.bfloat16() for n, w in start.items()}),
    }
    return {**losses, "seconds": time.perf_counter() - begin, "runs": runs}
