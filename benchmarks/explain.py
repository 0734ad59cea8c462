"""`python -m benchmarks.explain`: CPU time of `explain`, beside the capture itself.

The capture is `torch.compile(backend="eager")`'s first call, which captures the same
graphs and makes nothing of them.  `explain` is timed with its summary as text.  Both
run in one process on one thread, in turn; graphs are forgotten between.  Of a model of
seven billion parameters on the meta device, `explain` alone is timed, by the clock.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import autoamp
from autoamp.report.report import Report

from . import models, report
from .models import Chain
from .report import Data, option

LIMIT, META_LIMIT = 1.3, 60.0
"""Times the capture; seconds for the model on meta."""


@dataclass(frozen=True)
class Found:
    """Median CPU seconds of one model, and the median ratio of the pairs."""

    name: str
    nodes: int
    capture: float
    explain: float
    ratio: float


def _gpt2(layers: int) -> nn.Module:
    small = {"n_embd": 64, "n_head": 4, "vocab_size": 200}
    return models.gpt2(dropout=True, n_layer=layers, **small)


def _llama_7b() -> nn.Module:
    size = {"hidden_size": 4096, "intermediate_size": 11008}
    with torch.device("meta"):
        return models.llama(num_hidden_layers=32, num_attention_heads=32, **size)


CASES: tuple[tuple[str, Callable[[], nn.Module], Callable[[], torch.Tensor]], ...] = (
    ("gpt2, 12 layers", lambda: _gpt2(12), lambda: torch.arange(16).view(2, 8)),
    ("gpt2, 52 layers", lambda: _gpt2(52), lambda: torch.arange(16).view(2, 8)),
    ("chain of 3000 ops", lambda: Chain(3000), lambda: torch.randn(4, 8)),
)


def _explained(model: nn.Module, given: torch.Tensor, **kwargs: Any) -> Report:
    options = {"precision": "bf16", "do_no_harm": False}
    made = autoamp.explain(model, given, **options, kwargs=kwargs)
    str(made)
    return made


def _cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    torch._dynamo.reset()
    gc.collect()
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def measure(
    name: str,
    build: Callable[[], nn.Module],
    given: Callable[[], torch.Tensor],
    repeats: int,
) -> Found:
    """Medians of `repeats` pairs."""
    model, x = build(), given()
    model(x)
    pairs = []
    for _ in range(repeats):
        plain, _ = _cpu_seconds(lambda: torch.compile(model, backend="eager")(x))
        ours, made = _cpu_seconds(lambda: _explained(model, x))
        pairs.append((plain, ours))
    nodes = sum(len(each.before.graph.nodes) for each in made.rewritten)
    capture, explain = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(ours / plain for plain, ours in pairs)
    return Found(name, nodes, capture, explain, ratio)


def explain_on_meta() -> tuple[float, float, int]:
    """Seconds by the clock, billions of parameters and nodes of the model on meta."""
    model = _llama_7b()
    torch._dynamo.reset()
    start = time.perf_counter()
    made = _explained(
        model, torch.zeros(1, 2048, dtype=torch.long), device="cuda:sm_90"
    )
    taken = time.perf_counter() - start
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    nodes = sum(len(each.before.graph.nodes) for each in made.rewritten)
    return taken, billions, nodes


def measured_all(given: argparse.Namespace) -> Data:
    """The figures of each case that is asked for, and of the model on meta."""
    torch.set_num_threads(1)
    measure("warm-up", lambda: _gpt2(1), lambda: torch.arange(16).view(2, 8), 1)
    chosen = [case for case in CASES if given.only in case[0]]
    found = [asdict(measure(*case, given.repeats)) for case in chosen]
    taken, billions, nodes = explain_on_meta()
    return {
        "cases": found,
        "meta": {"seconds": taken, "billions": billions, "nodes": nodes},
    }


def text(data: Data) -> str:
    """The page."""
    header = ("explain of", "nodes", "capture s", "explain s", "ratio", "asked")
    rows = [
        (
            each["name"],
            str(each["nodes"]),
            *(f"{each[key]:.2f}" for key in ("capture", "explain", "ratio")),
            f"{LIMIT:.2f}",
        )
        for each in data["cases"]
    ]
    meta = data["meta"]
    on_meta = (
        f"Llama of {meta['billions']:.1f} billion parameters on meta, {meta['nodes']} "
        f"nodes, for cuda:sm_90: {meta['seconds']:.1f} s (asked {META_LIMIT:.0f} s)."
    )
    return report.page(data, report.markdown(header, rows), on_meta)


def good(data: Data) -> bool:
    """Whether every figure is within its limit."""
    within = all(each["ratio"] <= LIMIT for each in data["cases"])
    return within and data["meta"]["seconds"] <= META_LIMIT


TABLE = report.Table(
    "explain",
    measured_all,
    text,
    options=(option("--repeats", 5, "pairs"), report.ONLY),
    good=good,
    keeps=lambda given: not given.only,
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
