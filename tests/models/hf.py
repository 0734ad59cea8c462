"""Transformers models from their configs: random weights, nothing from a hub."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from torch import nn

from .case import Args, Case, generator, labelled, tokens

VOCAB = 96


def _causal(batch: int = 2, length: int = 12) -> Callable[[int], Args]:
    def inputs(seed: int) -> Args:
        ids = tokens(seed, batch, length, vocab=VOCAB)
        return (), {"input_ids": ids, "labels": ids}

    return inputs


def _gpt2(dropout: float = 0.0) -> Callable[[], nn.Module]:
    return lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCAB,
            n_positions=32,
            n_embd=48,
            n_layer=2,
            n_head=4,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    )


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def _bert() -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _bert_inputs(seed: int) -> Args:
    ids = tokens(seed, 2, 12, vocab=VOCAB)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return (), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCAB,
            d_model=48,
            d_kv=12,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def _t5_inputs(seed: int) -> Args:
    return (), {
        "input_ids": tokens(seed, 2, 10, vocab=VOCAB),
        "labels": tokens(seed + 500, 2, 8, vocab=VOCAB),
    }


def _vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            num_labels=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _vit_inputs(seed: int) -> Args:
    images = torch.randn(2, 3, 32, 32, generator=generator(seed))
    return (), {"pixel_values": images, "labels": tokens(seed, 2, vocab=10)}


def _whisper() -> nn.Module:
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=VOCAB,
            num_mel_bins=16,
            d_model=48,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            max_source_positions=16,
            max_target_positions=16,
            dropout=0.0,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def _whisper_inputs(seed: int) -> Args:
    mel = torch.randn(2, 16, 32, generator=generator(seed))
    return (), {"input_features": mel, "labels": tokens(seed, 2, 8, vocab=VOCAB)}


_HF = frozenset({"hf"})

CASES = (
    Case("gpt2", _gpt2(), _causal(), labelled, _HF),
    Case("gpt2_dropout", _gpt2(0.1), _causal(), labelled, _HF | {"dropout"}),
    Case("llama", _llama, _causal(), labelled, _HF),
    Case("bert", _bert, _bert_inputs, labelled, _HF),
    Case("t5", _t5, _t5_inputs, labelled, _HF),
    Case("vit", _vit, _vit_inputs, labelled, _HF),
    Case("whisper", _whisper, _whisper_inputs, labelled, _HF),
)
