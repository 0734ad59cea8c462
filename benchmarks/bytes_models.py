"""The models whose bytes are counted: the sizes of a small paper, and the zoo's.

Every model has random weights and each way to run it gets the same batch.  None has
dropout; those of `REAL` have stochastic depth.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.models.case import Args, Case, generator, labelled, tokens
from tests.zoo import site

VOCAB = 2000
LAYERS, WIDTH, HEADS = 4, 384, 6
LABELS = 100


def _gpt2(activation: str) -> Callable[[], nn.Module]:
    return lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCAB,
            n_positions=256,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            activation_function=activation,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    )


def _hidden(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * WIDTH,
        **more,
    }


def _bert() -> nn.Module:
    settings = _hidden(vocab_size=VOCAB, max_position_embeddings=256)
    return hf.BertForMaskedLM(hf.BertConfig(**settings, **_NO_DROPOUT))


def _llama() -> nn.Module:
    settings = _hidden(vocab_size=VOCAB, max_position_embeddings=256)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**settings, use_cache=False))


def _t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCAB,
            d_model=WIDTH,
            d_kv=WIDTH // HEADS,
            d_ff=4 * WIDTH,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def _vit() -> nn.Module:
    config = hf.ViTConfig(**_hidden(num_labels=LABELS), **_NO_DROPOUT)
    return hf.ViTForImageClassification(config)


def _resnet50() -> nn.Module:
    return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=LABELS))


def _convnext_tiny() -> nn.Module:
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=LABELS))


_NO_DROPOUT: dict[str, Any] = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _text(batch: int, length: int) -> Callable[[int], Args]:
    def inputs(seed: int) -> Args:
        ids = tokens(seed, batch, length, vocab=VOCAB)
        return (), {"input_ids": ids, "labels": ids}

    return inputs


def _images(batch: int, side: int = 224) -> Callable[[int], Args]:
    def inputs(seed: int) -> Args:
        pixels = torch.randn(batch, 3, side, side, generator=generator(seed))
        return (), {"pixel_values": pixels, "labels": torch.arange(batch) % LABELS}

    return inputs


PAPER: tuple[Case, ...] = (
    Case("gpt2", _gpt2("gelu_new"), _text(8, 256), labelled),
    Case("gpt2_tanh", _gpt2("gelu_pytorch_tanh"), _text(8, 256), labelled),
    Case("bert", _bert, _text(4, 128), labelled),
    Case("llama", _llama, _text(8, 256), labelled),
    Case("t5", _t5, _text(8, 256), labelled),
    Case("vit", _vit, _images(8), labelled),
    Case("resnet50", _resnet50, _images(4), labelled),
    Case("convnext_tiny", _convnext_tiny, _images(4), labelled),
)


def _written_out(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    """The model with its attention written out, as `output_attentions` needs it."""

    def made() -> nn.Module:
        model: Any = make()
        model.set_attn_implementation("eager")
        return model  # type: ignore[no-any-return]

    return made


WRITTEN: tuple[Case, ...] = tuple(
    Case(f"{name}_written", _written_out(make), inputs, labelled)
    for name, make, inputs in (
        ("gpt2", _gpt2("gelu_new"), _text(8, 256)),
        ("bert", _bert, _text(4, 128)),
        ("llama", _llama, _text(8, 256)),
        ("vit", _vit, _images(8)),
    )
)
"""Models of `PAPER` with `attn_implementation="eager"`."""

MICRO = Case("gpt2_micro", _gpt2("gelu_new"), _text(1, 256), labelled)
"""The GPT-2 of `PAPER`, for steps of several micro-batches of one text."""


def _torchvisions(name: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        site.activate()
        model: nn.Module = getattr(
            importlib.import_module("torchvision.models"), name
        )()
        return model

    return made


def _one_image(seed: int) -> Args:
    return (torch.randn(1, 3, 224, 224, generator=generator(seed)),), {}


def _first_label(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), torch.zeros(1, dtype=torch.long))


REAL: tuple[Case, ...] = tuple(
    Case(f"real/{name}", _torchvisions(name), _one_image, _first_label)
    for name in ("convnext_tiny", "efficientnet_b0", "maxvit_t", "swin_t", "swin_v2_t")
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
        from tests.zoo import BY_NAME

        return BY_NAME[name.removeprefix("zoo/")]
    return {case.name: case for case in (*PAPER, *WRITTEN, *REAL, MICRO)}[name]
