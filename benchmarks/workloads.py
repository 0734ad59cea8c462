"""What is timed: models from their configs, random weights, seeded batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import full_models
from .errors import Batch

Kind = Literal["training", "micro-batches", "inference"]
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """A model, one batch and what is done with them.

    `steps` forwards (and backwards, in training) make one timed step; the optimizer
    steps once after them.
    """

    name: str
    kind: Kind
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]

    @property
    def steps(self) -> int:
        """Forwards in one timed step."""
        return MICRO_BATCHES if self.kind == "micro-batches" else 1

    def loss(self, output: Any) -> Tensor:
        """The model's own loss, or the mean square of its output, in fp32."""
        value = output.loss if hasattr(output, "loss") else output.square().mean()
        return value.float()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _ids(batch: int, length: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=_generator())


def workloads(quick: bool) -> list[Workload]:
    """Every workload of the table, small ones where `quick`."""
    n = 8 if quick else 16
    length = 32 if quick else 128
    vocab = {"bert": 1000 if quick else 30522, "gpt2": 1000 if quick else 50257}
    t5_vocab = 1000 if quick else 32128
    side = 64 if quick else 224
    width = 256 if quick else 1024

    def text(name: str, batch: int, size: int, labels: bool = True) -> Batch:
        ids = _ids(batch, size, vocab[name])
        return (), {"input_ids": ids} | ({"labels": ids} if labels else {})

    def translation(batch: int) -> Batch:
        ids = _ids(batch, length, t5_vocab)
        return (), {"input_ids": ids, "labels": ids}

    def images(batch: int) -> Batch:
        pixels = torch.randn(batch, 3, side, side, generator=_generator())
        return (), {"pixel_values": pixels, "labels": torch.arange(batch) % 100}

    def vectors(batch: int) -> Batch:
        return (torch.randn(batch, width, generator=_generator()),), {}

    rows: list[tuple[str, Callable[[bool], nn.Module], Callable[[int], Batch]]] = [
        ("resnet50", full_models.resnet50, images),
        ("vit_b", full_models.vit, images),
        ("gpt2", full_models.gpt2, lambda b: text("gpt2", b, length)),
        ("bert", full_models.bert, lambda b: text("bert", b, length)),
        ("t5", full_models.t5, translation),
        ("mlp", full_models.mlp, vectors),
    ]

    def row(
        name: str,
        kind: Kind,
        build: Callable[[bool], nn.Module],
        batch: Callable[[int], Batch],
        size: int,
    ) -> Workload:
        return Workload(name, kind, lambda: build(quick), lambda: batch(size))

    found = [row(f"{r[0]} batch {n}", "training", *r[1:], n) for r in rows]
    found += [
        row(f"{r[0]} {MICRO_BATCHES} x {n // 4}", "micro-batches", *r[1:], n // 4)
        for r in rows
        if r[0] in ("gpt2", "bert")
    ]
    for size in (1, 32) if quick else (1, 8, 32, 128):
        found.append(
            Workload(
                f"gpt2 batch 1 length {size}",
                "inference",
                lambda: full_models.gpt2(quick),
                lambda size=size: text("gpt2", 1, size, labels=False),
            )
        )
    found.append(row("mlp batch 1", "inference", full_models.mlp, vectors, 1))
    return found
