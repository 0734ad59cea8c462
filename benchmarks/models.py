"""The models that are measured: each once, at the sizes and batches of each table.

All have random weights.  None has dropout, so that every way to run a model computes
the same; those of `REAL` have stochastic depth, and `dropout=True` asks for dropout.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from tests.models.case import Args, Case, generator, labelled, normal, tokens
from tests.zoo import site

LABELS = 100
Build = Callable[..., nn.Module]
Inputs = Callable[[int], Args]

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(*, dropout: bool = False, **size: Any) -> nn.Module:
    """GPT-2, by default of 124 M parameters."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False} | size
    return hf.GPT2LMHeadModel(hf.GPT2Config(**size, **({} if dropout else none)))


def bert(*, dropout: bool = False, **size: Any) -> nn.Module:
    """BERT, by default BERT-base."""
    config = hf.BertConfig(**size, **({} if dropout else _NO_DROPOUT))
    return hf.BertForMaskedLM(config)


def llama(**size: Any) -> nn.Module:
    """Llama."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{"use_cache": False} | size))


def t5(*, dropout: bool = False, **size: Any) -> nn.Module:
    """T5, by default T5-small."""
    none = {} if dropout else {"dropout_rate": 0.0}
    config = hf.T5Config(**size, **none, use_cache=False, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config)


def vit(*, dropout: bool = False, **size: Any) -> nn.Module:
    """ViT, by default ViT-B/16."""
    none = {} if dropout else _NO_DROPOUT
    config = hf.ViTConfig(**size, **none, num_labels=LABELS)
    return hf.ViTForImageClassification(config)


def resnet50(**size: Any) -> nn.Module:
    """ResNet, by default ResNet-50."""
    config = hf.ResNetConfig(**{"num_labels": LABELS} | size)
    return hf.ResNetForImageClassification(config)


def convnext_tiny(**size: Any) -> nn.Module:
    """ConvNeXt, by default ConvNeXt-T."""
    config = hf.ConvNextConfig(**size, num_labels=LABELS)
    return hf.ConvNextForImageClassification(config)


def mlp(width: int = 1024) -> nn.Module:
    """Two linear layers."""
    layers = (nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
    return nn.Sequential(*layers)


class Chain(nn.Module):
    """Residual blocks of eight operators, two of them matmuls, without modules."""

    def __init__(self, ops: int, width: int = 8) -> None:
        super().__init__()
        self.blocks = ops // 8
        self.weight = nn.Parameter(torch.randn(width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.blocks):
            y = functional.layer_norm(x, x.shape[-1:])
            y = functional.linear(y, self.weight)
            y = functional.gelu(y)
            y = y * torch.sigmoid(x)
            y = functional.linear(y, self.weight)
            y = y / (1 + 0.1)
            x = x + y
        return x


def text(batch: int, length: int, vocab: int) -> Inputs:
    """Token ids, which are the labels too."""

    def inputs(seed: int) -> Args:
        ids = tokens(seed, batch, length, vocab=vocab)
        return (), {"input_ids": ids, "labels": ids}

    return inputs


def images(batch: int, side: int = 224) -> Inputs:
    """Images and a label for each."""

    def inputs(seed: int) -> Args:
        pixels = torch.randn(batch, 3, side, side, generator=generator(seed))
        return (), {"pixel_values": pixels, "labels": torch.arange(batch) % LABELS}

    return inputs


# -- the sizes that people train -------------------------------------------------------

_SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
_LLAMA_219M = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "vocab_size": 32000,
}
_T5_SMALL = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
QUICK_VOCAB = 1000

FULL: Mapping[str, tuple[Build, dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        gpt2,
        {},
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": QUICK_VOCAB},
    ),
    "bert": (bert, {}, {**_SMALL, "vocab_size": QUICK_VOCAB}),
    "llama": (llama, _LLAMA_219M, {**_SMALL, "vocab_size": QUICK_VOCAB}),
    "t5": (t5, {}, {**_T5_SMALL, "vocab_size": QUICK_VOCAB}),
    "vit": (vit, {}, {**_SMALL, "image_size": 64}),
    "resnet50": (
        resnet50,
        {},
        {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [1, 1]},
    ),
    "convnext_tiny": (
        convnext_tiny,
        {},
        {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2},
    ),
    "mlp": (mlp, {}, {"width": 256}),
}
"""Each model by name: its class, its full size and its small size."""


def full(name: str, quick: bool) -> nn.Module:
    """A model at the size that people train; a small one where `quick`."""
    build, large, small = FULL[name]
    return build(**(small if quick else large))


def _full_case(name: str, inputs: Inputs, quick: bool, title: str = "") -> Case:
    return Case(title or name, partial(full, name, quick), inputs, labelled)


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    """The seven models, each with a batch that keeps a GPU busy."""

    def read(batch: int, length: int, vocab: int) -> Inputs:
        return text(2, 16, QUICK_VOCAB) if quick else text(batch, length, vocab)

    def seen(batch: int) -> Inputs:
        return images(2, 64) if quick else images(batch)

    batches = {
        "gpt2": read(8, 1024, 50257),
        "bert": read(32, 128, 30522),
        "llama": read(8, 1024, 32000),
        "t5": read(32, 256, 32128),
        "vit": seen(64),
        "resnet50": seen(128),
        "convnext_tiny": seen(64),
    }
    return tuple(_full_case(name, each, quick) for name, each in batches.items())


def said_of_gpu_batches(quick: bool) -> str:
    """What a table says about the batches of `gpu_cases`."""
    if quick:
        return (
            "The models and batches are small, to try the command: their times say "
            "nothing."
        )
    return """\
The batches are 8 x 1024 tokens of GPT-2 and Llama (219 M parameters), 32 x 128 of
BERT-base, 32 x 256 of T5-small, 64 images of ViT-B and ConvNeXt-T, 128 of ResNet-50."""


# -- workloads of `python -m benchmarks` -----------------------------------------------

Kind = Literal["training", "micro-batches", "inference"]
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """A model with a batch, and what is done with them.

    `steps` forwards (and backwards, in training) make one timed step; the optimizer
    steps once after them.
    """

    name: str
    kind: Kind
    case: Case

    @property
    def steps(self) -> int:
        """Forwards in one timed step."""
        return MICRO_BATCHES if self.kind == "micro-batches" else 1


def workloads(quick: bool) -> list[Workload]:
    """Every workload of the table, small ones where `quick`."""
    n, length, width = (8, 32, 256) if quick else (16, 128, 1024)
    words = dict.fromkeys(("gpt2", "bert", "t5"), QUICK_VOCAB)
    words = words if quick else {"gpt2": 50257, "bert": 30522, "t5": 32128}
    side = 64 if quick else 224

    def case(name: str, batch: int) -> Case:
        model = name.removesuffix("_b")  # the table says "vit_b"
        if name == "mlp":
            build = partial(full, name, quick)
            return Case(name, build, normal(batch, width), _mean_square)
        read = text(batch, length, words[name]) if name in words else None
        return _full_case(model, read or images(batch, side), quick, name)

    names = ("resnet50", "vit_b", "gpt2", "bert", "t5", "mlp")
    found = [Workload(f"{m} batch {n}", "training", case(m, n)) for m in names]
    for name in ("gpt2", "bert"):
        title = f"{name} {MICRO_BATCHES} x {n // 4}"
        found.append(Workload(title, "micro-batches", case(name, n // 4)))
    for size in (1, 32) if quick else (1, 8, 32, 128):
        one = _full_case("gpt2", _without_labels(text(1, size, words["gpt2"])), quick)
        found.append(Workload(f"gpt2 batch 1 length {size}", "inference", one))
    return [*found, Workload("mlp batch 1", "inference", case("mlp", 1))]


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean().float()


def _without_labels(inputs: Inputs) -> Inputs:
    return lambda seed: ((), {"input_ids": inputs(seed)[1]["input_ids"]})


# -- the sizes of a small paper, and the zoo's -----------------------------------------

VOCAB = 2000
LAYERS, WIDTH, HEADS = 4, 384, 6
_HIDDEN = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
}
_WORDS = {"vocab_size": VOCAB, "max_position_embeddings": 256}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_positions": 256,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 4 * WIDTH,
    "num_layers": LAYERS,
    "num_heads": HEADS,
}


def _paper(name: str, build: Build, inputs: Inputs, **size: Any) -> Case:
    return Case(name, partial(build, **size), inputs, labelled)


_READ = text(8, 256, VOCAB)
_TANH = {**_GPT2, "activation_function": "gelu_pytorch_tanh"}
PAPER: tuple[Case, ...] = (
    _paper("gpt2", gpt2, _READ, **_GPT2),
    _paper("gpt2_tanh", gpt2, _READ, **_TANH),
    _paper("bert", bert, text(4, 128, VOCAB), **_HIDDEN, **_WORDS),
    _paper("llama", llama, _READ, **_HIDDEN, **_WORDS),
    _paper("t5", t5, _READ, **_T5),
    _paper("vit", vit, images(8), **_HIDDEN),
    _paper("resnet50", resnet50, images(4)),
    _paper("convnext_tiny", convnext_tiny, images(4)),
)


def _written_out(case: Case) -> Case:
    """The model with its attention written out, as `output_attentions` needs it."""

    def made() -> nn.Module:
        model: Any = case.build()
        model.set_attn_implementation("eager")
        return model  # type: ignore[no-any-return]

    return Case(f"{case.name}_written", made, case.inputs, case.loss)


_ATTEND = ("gpt2", "bert", "llama", "vit")
WRITTEN = tuple(_written_out(case) for case in PAPER if case.name in _ATTEND)
"""Models of `PAPER` with `attn_implementation="eager"`."""

MICRO = _paper("gpt2_micro", gpt2, text(1, 256, VOCAB), **_GPT2)
"""The GPT-2 of `PAPER`, for steps of several micro-batches of one text."""


def torchvisions(name: str) -> nn.Module:
    """A model of torchvision as it is trained."""
    site.activate()
    model: nn.Module = getattr(importlib.import_module("torchvision.models"), name)()
    return model


CONVOLVE = {"vit", "vit_written", "resnet50", "convnext_tiny"}
"""Models of the tables of times that have convolutions, at any size."""


def _first_label(output: Tensor) -> Tensor:
    return functional.cross_entropy(output.float(), torch.zeros(1, dtype=torch.long))


REAL: tuple[Case, ...] = tuple(
    Case(
        f"real/{each}",
        partial(torchvisions, each),
        normal(1, 3, 224, 224),
        _first_label,
    )
    for each in ("convnext_tiny", "efficientnet_b0", "maxvit_t", "swin_t", "swin_v2_t")
)
"""Torchvision's models as they are trained: with the stochastic depth of their own,
which the models of tests/zoo leave out."""


def zoo() -> tuple[Case, ...]:
    """The models of tests/zoo, in the order of `python -m benchmarks.zoo`."""
    from tests.zoo import BY_NAME

    return tuple(BY_NAME.values())


def case_of(name: str) -> Case:
    """The model named; `zoo/NAME` is one of the zoo."""
    if name.startswith("zoo/"):
        return {case.name: case for case in zoo()}[name.removeprefix("zoo/")]
    return {case.name: case for case in (*PAPER, *WRITTEN, *REAL, MICRO)}[name]
