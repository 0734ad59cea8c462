"""`python -m benchmarks.first_call`: CPU time of first calls, beside `torch.compile`'s.

Seconds of CPU that the first call of a model takes, converted and under
`torch.compile(backend="eager")`, which captures the same graphs and makes nothing of
them.  Both run in one process on one thread, in turn, after a call of another model has
imported what either needs; the median of several pairs is kept, of more pairs where
one takes little time.  Graphs are forgotten between.

The last column is the part of a first call that the checks of all passes take.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autoamp

from . import models, report
from .errors import Batch
from .report import Data, option

LIMIT, RECURRENT_LIMIT = 1.25, 2.0
"""Times plain torch.compile: for graphs of over 100 nodes and all but the first of a
class; for recurrent layers."""

MODELS_OF_A_CLASS = 30

LEAST = 2.0
"""Seconds of CPU that the pairs of a case take at least: short ones scatter most."""


@dataclass(frozen=True)
class Case:
    """A model, its batch, the ratio asked, and whether only later models are counted.

    Args:
        allow_rnn: plain torch.compile captures recurrent layers as well; by default it
            leaves them to Python, which takes no time.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    limit: float
    models: int = 1
    allow_rnn: bool = False


@dataclass(frozen=True)
class Found:
    """Median CPU seconds of one case, and the median ratio of the pairs.

    Args:
        checks: the part of a first call that the checks take.
    """

    name: str
    nodes: int
    plain: float
    ours: float
    ratio: float
    limit: float
    checks: float


class Recurrent(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, kind: type[nn.RNNBase], layers: int) -> None:
        super().__init__()
        self.rnn = kind(16, 32, num_layers=layers, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Small(nn.Module):
    """One of an ensemble."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


_HIDDEN: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_GPT2 = {"n_layer": 12, "n_embd": 64, "n_head": 4, "vocab_size": 200}
_BERT = {**_HIDDEN, "vocab_size": 200}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": 200}
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "num_labels": 10}
_VIT = {**_HIDDEN, "image_size": 32, "patch_size": 8}


def _ids() -> Batch:
    return (), {"input_ids": torch.arange(16).view(2, 8)}


def _pairs() -> Batch:
    ids = torch.arange(16).view(2, 8)
    return (), {"input_ids": ids, "labels": ids}


def _pixels() -> Batch:
    return (torch.randn(2, 3, 32, 32),), {}


def _vectors() -> Batch:
    return (torch.randn(4, 16),), {}


def _series() -> Batch:
    return (torch.randn(2, 5, 16),), {}


CASES = (
    *(
        Case(name, partial(build, **size, **dropout), batch, LIMIT)
        for name, build, size, dropout, batch in (
            ("gpt2, 12 layers", models.gpt2, _GPT2, {"dropout": True}, _ids),
            ("bert, 12 layers", models.bert, _BERT, {"dropout": True}, _ids),
            ("t5, 6 + 6 layers", models.t5, _T5, {"dropout": True}, _pairs),
            ("resnet50", models.resnet50, _RESNET, {}, _pixels),
            ("vit, 12 layers", models.vit, _VIT, {}, _pixels),
        )
    ),
    *(
        Case(
            f"{kind.__name__}, {layers} layers",
            partial(Recurrent, kind, layers),
            _series,
            RECURRENT_LIMIT,
            allow_rnn=True,
        )
        for kind, layers in ((nn.LSTM, 1), (nn.LSTM, 3), (nn.GRU, 2), (nn.RNN, 2))
    ),
    Case("2nd to 30th of a class", Small, _vectors, LIMIT, models=MODELS_OF_A_CLASS),
)


def first_calls(case: Case, start: Callable[[nn.Module], nn.Module]) -> float:
    """CPU seconds until every model of a case has been called once.

    Where there are several, of all but the first.

    Args:
        start: compiles or converts a model.
    """
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    models = [case.build() for _ in range(case.models)]
    args, kwargs = case.batch()
    models[0](*args, **kwargs)
    taken = []
    for model in models:
        begin = time.process_time()
        start(model)(*args, **kwargs)
        taken.append(time.process_time() - begin)
    return sum(taken[1:] or taken)


def _plain(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _ours(model: nn.Module) -> nn.Module:
    return autoamp.convert(model, precision="bf16", do_no_harm=False)


def measure(case: Case, repeats: int) -> Found:
    """Medians of `repeats` pairs, or more."""
    pairs: list[tuple[float, float]] = []
    while len(pairs) < repeats or sum(map(sum, pairs)) < LEAST:
        with torch._dynamo.config.patch(allow_rnn=case.allow_rnn):
            plain = first_calls(case, _plain)
        pairs.append((plain, first_calls(case, _ours)))
    plain, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(ours / plain for plain, ours in pairs)
    nodes, checks = _nodes_and_checks(case)
    return Found(case.name, nodes, plain, ours, ratio, case.limit, checks)


def _nodes_and_checks(case: Case) -> tuple[int, float]:
    """How many nodes the graphs of a case have, and the checks' part of its call."""
    torch._dynamo.reset()
    model = _ours(case.build())
    args, kwargs = case.batch()
    begin = time.perf_counter()
    model(*args, **kwargs)
    taken = time.perf_counter() - begin
    recorded = [g.rewritten for g in model._autoamp.engine.record.graphs]
    graphs = [each for each in recorded if each is not None]
    seconds = [pair for each in graphs for pair in each.seconds.items()]
    checks = sum(s for name, s in seconds if name.startswith("check of "))
    return sum(len(each.before.graph.nodes) for each in graphs), checks / taken


def measure_all(given: argparse.Namespace) -> Data:
    """The figures of the cases that are asked for."""
    torch.set_num_threads(1)
    for start in (_plain, _ours):
        first_calls(Case("warm-up", Small, _vectors, 0.0), start)
    chosen = [case for case in CASES if given.only in case.name]
    return {"cases": [asdict(measure(case, given.repeats)) for case in chosen]}


def _above(data: Data) -> list[str]:
    return [f["name"] for f in data["cases"] if f["ratio"] > f["limit"]]


def text(data: Data) -> str:
    """The page."""
    rows = [
        (
            f["name"],
            str(f["nodes"]),
            *(f"{f[key]:.3f}" for key in ("plain", "ours")),
            *(f"{f[key]:.2f}" for key in ("ratio", "limit")),
            f"{f['checks']:.1%}",
        )
        for f in data["cases"]
    ]
    verdict = f"above the ratio asked: {', '.join(_above(data)) or 'none'}"
    return report.page(data, report.markdown(HEADER, rows), verdict)


HEADER = (
    *("first call of", "nodes", "torch.compile s", "autoamp s", "ratio", "asked"),
    "checks",
)

TABLE = report.Table(
    "first_call",
    measure_all,
    text,
    options=(option("--repeats", 5, "pairs, at least"), report.ONLY),
    good=lambda data: not _above(data),
    keeps=lambda given: not given.only,
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
