"""The models that are measured: each once, at the sizes and batches of each table.

All have random weights.  None has dropout, so that every way to run a model computes
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.models.case import Args, Case, generator, labelled, tokens
from tests.zoo import BY_NAME as ZOO

LABELS = 100
Inputs = Callable[[int], Args]

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_CLASSES: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        | {"bos_token_id": 0, "eos_token_id": 0},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _NO_DROPOUT),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"use_cache": False}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0},
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**_NO_DROPOUT, "num_labels": LABELS},
    ),
    "resnet50": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"num_labels": LABELS},
    ),
    "convnext_tiny": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"num_labels": LABELS},
    ),
}
"""Each model by name: transformers' model and configuration, and what is always set."""


def build(name: str, **size: Any) -> nn.Module:
    """A model; what `size` leaves out is as in the configuration of transformers."""
    model, config, always = _CLASSES[name]
    made: nn.Module = getattr(hf, model)(getattr(hf, config)(**{**always, **size}))
    return made


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

_LLAMA_219M = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "vocab_size": 32000,
}
QUICK_VOCAB = 1000
_QUICK: Mapping[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": QUICK_VOCAB},
    "bert": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": QUICK_VOCAB,
    },
    "resnet50": {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [1, 1]},
}
"""The models that only try a command, and their sizes."""


def full_case(name: str, inputs: Inputs, quick: bool) -> Case:
    """A model at the size that people train; a small one where `quick`."""
    size = _QUICK[name] if quick else _LLAMA_219M if name == "llama" else {}
    return Case(name, partial(build, name, **size), inputs, labelled)


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    """Seven models with batches that keep a GPU busy; two small ones where `quick`."""
    batches = {
        "gpt2": text(8, 1024, 50257),
        "bert": text(32, 128, 30522),
        "llama": text(8, 1024, 32000),
        "t5": text(32, 256, 32128),
        "vit": images(64),
        "resnet50": images(128),
        "convnext_tiny": images(64),
    }
    if quick:
        batches = {"bert": text(2, 16, QUICK_VOCAB), "resnet50": images(2, 64)}
    return tuple(full_case(name, each, quick) for name, each in batches.items())


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


# -- the sizes of a small paper --------------------------------------------------------

VOCAB = 2000
LAYERS, WIDTH, HEADS = 4, 384, 6
_HIDDEN = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
}
_WORDS = {**_HIDDEN, "vocab_size": VOCAB, "max_position_embeddings": 256}
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


def _paper(name: str, inputs: Inputs, title: str = "", **size: Any) -> Case:
    return Case(title or name, partial(build, name, **size), inputs, labelled)


_READ = text(8, 256, VOCAB)
_TANH = {**_GPT2, "activation_function": "gelu_pytorch_tanh"}
PAPER: tuple[Case, ...] = (
    _paper("gpt2", _READ, **_GPT2),
    _paper("gpt2", _READ, "gpt2_tanh", **_TANH),
    _paper("bert", text(4, 128, VOCAB), **_WORDS),
    _paper("llama", _READ, **_WORDS),
    _paper("t5", _READ, **_T5),
    _paper("vit", images(8), **_HIDDEN),
    _paper("resnet50", images(4)),
    _paper("convnext_tiny", images(4)),
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

MICRO = _paper("gpt2", text(1, 256, VOCAB), "gpt2_micro", **_GPT2)
"""The GPT-2 of `PAPER`, for steps of several micro-batches of one text."""

MICRO_BATCHES = 8

CONVOLVE = {"vit", "vit_written", "resnet50", "convnext_tiny"}
"""Models of the tables of times that have convolutions, at any size."""


def case_of(name: str) -> Case:
    """The model named, at the size of a small paper; `zoo/NAME` is one of tests/zoo."""
    if name.startswith("zoo/"):
        return ZOO[name.removeprefix("zoo/")]
    return {case.name: case for case in (*PAPER, *WRITTEN, MICRO)}[name]
