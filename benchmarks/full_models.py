"""Models at the sizes that people train, with random weights; small where `quick`.

No model has dropout, so that every way to run it computes the same.
"""

from __future__ import annotations

import transformers as hf
from torch import nn

LABELS = 100
QUICK_VOCAB = 1000
"""Tokens that a small language model knows."""


def gpt2(quick: bool) -> nn.Module:
    """GPT-2 of 124 M parameters."""
    size = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": QUICK_VOCAB}
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


def bert(quick: bool) -> nn.Module:
    """BERT-base."""
    size = _hidden(vocab_size=QUICK_VOCAB)
    config = hf.BertConfig(
        **(size if quick else {}),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertForMaskedLM(config)


def t5(quick: bool) -> nn.Module:
    """T5-small, the default of its config."""
    size = {
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 256,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": QUICK_VOCAB,
    }
    config = hf.T5Config(
        **(size if quick else {}),
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def vit(quick: bool) -> nn.Module:
    """ViT-B/16."""
    size = _hidden(image_size=64)
    config = hf.ViTConfig(
        **(size if quick else {}),
        num_labels=LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.ViTForImageClassification(config)


def resnet50(quick: bool) -> nn.Module:
    """ResNet-50, the default of its config."""
    size = {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [1, 1]}
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(**(size if quick else {}), num_labels=LABELS)
    )


def convnext_tiny(quick: bool) -> nn.Module:
    """ConvNeXt-T, the default of its config."""
    size = {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2}
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(**(size if quick else {}), num_labels=LABELS)
    )


def llama(quick: bool) -> nn.Module:
    """A Llama of 12 layers, 1024 wide: 219 M parameters."""
    size = {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "vocab_size": 32000,
    }
    size |= _hidden(vocab_size=QUICK_VOCAB) if quick else {}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**size, use_cache=False))


def mlp(quick: bool) -> nn.Module:
    """Two linear layers, 1024 wide."""
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
