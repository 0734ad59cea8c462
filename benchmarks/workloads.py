"""What is timed: models from their configs, random weights, seeded batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers as hf
from torch import Tensor, nn

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


def _gpt2(quick: bool) -> nn.Module:
    size = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 1000}
    config = hf.GPT2Config(
        **(size if quick else {}),
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return hf.GPT2LMHeadModel(config)


def _bert(quick: bool) -> nn.Module:
    size = _hidden(vocab_size=1000)
    config = hf.BertConfig(
        **(size if quick else {}),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertForMaskedLM(config)


def _t5(quick: bool) -> nn.Module:
    size = {
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 256,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 1000,
    }
    # Without `quick`, the defaults: T5-small.
    config = hf.T5Config(
        **(size if quick else {}),
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def _vit(quick: bool) -> nn.Module:
    size = _hidden(image_size=64)
    config = hf.ViTConfig(
        **(size if quick else {}),
        num_labels=100,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.ViTForImageClassification(config)


def _resnet(quick: bool) -> nn.Module:
    size = {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [1, 1]}
    # Without `quick`, the defaults: ResNet-50.
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(**(size if quick else {}), num_labels=100)
    )


def _mlp(quick: bool) -> nn.Module:
    width = 256 if quick else 1024
    return nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
    )


def _hidden(**more: int) -> dict[str, int]:
    size = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    return size | more


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
        ("resnet50", _resnet, images),
        ("vit_b", _vit, images),
        ("gpt2", _gpt2, lambda b: text("gpt2", b, length)),
        ("bert", _bert, lambda b: text("bert", b, length)),
        ("t5", _t5, translation),
        ("mlp", _mlp, vectors),
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
                lambda: _gpt2(quick),
                lambda size=size: text("gpt2", 1, size, labels=False),
            )
        )
    found.append(row("mlp batch 1", "inference", _mlp, vectors, 1))
    return found
