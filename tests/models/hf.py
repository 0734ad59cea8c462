"""Transformers models from their configs: random weights, nothing from a hub."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .case import Args, Case, generator, labelled, tokens
from .tiny import VOCAB, tiny

LENGTH = 12


def causal(seed: int) -> Args:
    ids = tokens(seed, 2, LENGTH, vocab=VOCAB)
    return (), {"input_ids": ids, "labels": ids}


def masked(seed: int) -> Args:
    """The second text is shorter, and its padding is hidden."""
    ids = tokens(seed, 2, LENGTH, vocab=VOCAB)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return (), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def translated(seed: int) -> Args:
    return (), {
        "input_ids": tokens(seed, 2, 10, vocab=VOCAB),
        "labels": tokens(seed + 500, 2, 8, vocab=VOCAB),
    }


def _pictures(seed: int) -> Args:
    images = torch.randn(2, 3, 32, 32, generator=generator(seed))
    return (), {"pixel_values": images, "labels": tokens(seed, 2, vocab=10)}


def spectra(seed: int) -> Args:
    mel = torch.randn(2, 16, 32, generator=generator(seed))
    return (), {"input_features": mel, "labels": tokens(seed, 2, 8, vocab=VOCAB)}


SEQUENCES = {"encoder_layers": 2, "decoder_layers": 2}
SEQUENCES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
SEQUENCES |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
"""What the configs of encoder-decoders call their layers."""

T5 = {"d_kv": 12, "d_ff": 96, "decoder_start_token_id": 0}


def gpt2(dropout: float = 0.0) -> nn.Module:
    return tiny("GPT2LMHeadModel", dropout, n_positions=32)


def whisper(**settings: Any) -> nn.Module:
    return tiny(
        "WhisperForConditionalGeneration",
        num_mel_bins=16,
        max_source_positions=16,
        max_target_positions=16,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **SEQUENCES,
        **settings,
    )


CASES = (
    Case("gpt2", gpt2, causal, labelled, frozenset({"hf"})),
    Case(
        "gpt2_dropout",
        lambda: gpt2(0.1),
        causal,
        labelled,
        frozenset({"hf", "dropout"}),
    ),
    *(
        Case(name, build, inputs, labelled, frozenset({"hf"}))
        for name, build, inputs in (
            ("llama", lambda: tiny("LlamaForCausalLM", pad_token_id=None), causal),
            (
                "bert",
                lambda: tiny("BertForMaskedLM", max_position_embeddings=32),
                masked,
            ),
            ("t5", lambda: tiny("T5ForConditionalGeneration", **T5), translated),
            (
                "vit",
                lambda: tiny(
                    "ViTForImageClassification",
                    image_size=32,
                    patch_size=8,
                    num_labels=10,
                ),
                _pictures,
            ),
            ("whisper", lambda: whisper(decoder_start_token_id=1), spectra),
        )
    ),
)
