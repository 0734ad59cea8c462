"""Language models of transformers: decoders, encoders, encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.models.case import Args, Case, labelled, tokens
from tests.models.hf import LENGTH, SEQUENCES, T5, causal, masked
from tests.models.tiny import VOCAB, tiny

Row = tuple[str, str, dict[str, Any]]
"""A case's name, the class in transformers, and what its config needs besides."""

_EXPERTS = {"num_experts_per_tok": 2}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

DECODERS: tuple[Row, ...] = (
    ("gpt2", "GPT2LMHeadModel", {}),
    ("gpt_neo", "GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]]}),
    ("gpt_j", "GPTJForCausalLM", {"rotary_dim": 4}),
    ("gpt_neox", "GPTNeoXForCausalLM", {}),
    ("opt", "OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    ("bloom", "BloomForCausalLM", {}),
    ("mpt", "MptForCausalLM", {"max_seq_len": 64}),
    ("falcon", "FalconForCausalLM", {}),
    ("xglm", "XGLMForCausalLM", {"ffn_dim": 96}),
    ("llama", "LlamaForCausalLM", {}),
    ("mistral", "MistralForCausalLM", {"sliding_window": 8}),
    ("mixtral", "MixtralForCausalLM", {"num_local_experts": 4, **_EXPERTS}),
    ("qwen2", "Qwen2ForCausalLM", {}),
    ("qwen3", "Qwen3ForCausalLM", {"head_dim": 12}),
    ("gemma", "GemmaForCausalLM", {"head_dim": 12}),
    ("gemma2", "Gemma2ForCausalLM", {"head_dim": 12, "sliding_window": 8}),
    ("gemma3", "Gemma3ForCausalLM", {"head_dim": 12, "sliding_window": 8}),
    ("phi", "PhiForCausalLM", {}),
    ("cohere", "CohereForCausalLM", {}),
    (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "head_dim": 8,
            **_EXPERTS,
        },
    ),
    (
        "gpt_oss",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "head_dim": 12, "sliding_window": 8, **_EXPERTS},
    ),
    ("mamba", "MambaForCausalLM", {"state_size": 8, "time_step_rank": 4}),
    ("rwkv", "RwkvForCausalLM", {"attention_hidden_size": 48}),
    (
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        {
            "lru_width": 48,
            "num_hidden_layers": 3,
            "attention_window_size": 8,
            "head_dim": 12,
        },
    ),
    ("xlnet", "XLNetLMHeadModel", {"d_inner": 96, "d_head": 12}),
)

ENCODERS: tuple[Row, ...] = (
    ("bert", "BertForMaskedLM", {}),
    ("roberta", "RobertaForMaskedLM", {}),
    ("albert", "AlbertForMaskedLM", {"embedding_size": 24}),
    ("distilbert", "DistilBertForMaskedLM", {"hidden_dim": 96}),
    ("electra", "ElectraForMaskedLM", {"embedding_size": 24}),
    ("deberta", "DebertaForMaskedLM", _RELATIVE),
    ("deberta_v2", "DebertaV2ForMaskedLM", _RELATIVE),
    (
        "mobilebert",
        "MobileBertForMaskedLM",
        {"embedding_size": 24, "intra_bottleneck_size": 24, "true_hidden_size": 24},
    ),
    (
        "modernbert",
        "ModernBertForMaskedLM",
        {"global_attn_every_n_layers": 2, "local_attention": 8, "pad_token_id": 0},
    ),
    ("convbert", "ConvBertForMaskedLM", {"embedding_size": 48}),
    ("squeezebert", "SqueezeBertForMaskedLM", {"embedding_size": 48}),
    ("fnet", "FNetForMaskedLM", {"tpu_short_seq_length": 12}),
    ("longformer", "LongformerForMaskedLM", {"attention_window": 4}),
    ("xmod", "XmodForMaskedLM", {"default_language": "en_XX"}),
    (
        "funnel",
        "FunnelForMaskedLM",
        {"block_sizes": [1, 1], "d_head": 12, "d_inner": 96, "num_decoder_layers": 1},
    ),
)

_SEQ = {"d_model": 48, **SEQUENCES}

ENCODER_DECODERS: tuple[Row, ...] = (
    ("t5", "T5ForConditionalGeneration", T5),
    (
        "switch",
        "SwitchTransformersForConditionalGeneration",
        {
            **T5,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_experts": 4,
        },
    ),
    ("bart", "BartForConditionalGeneration", _SEQ),
    ("pegasus", "PegasusForConditionalGeneration", _SEQ),
    ("m2m_100", "M2M100ForConditionalGeneration", _SEQ),
)


def _translated(seed: int) -> Args:
    return (), {
        "input_ids": tokens(seed, 2, LENGTH, vocab=VOCAB),
        "labels": tokens(seed + 500, 2, 8, vocab=VOCAB),
    }


def _cases(rows: tuple[Row, ...], inputs: Callable[[int], Args]) -> tuple[Case, ...]:
    def build(model: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
        return lambda: tiny(model, **settings)

    return tuple(
        Case(name, build(model, settings), inputs, labelled)
        for name, model, settings in rows
    )


CASES = (
    *_cases(DECODERS, causal),
    *_cases(ENCODERS, masked),
    *_cases(ENCODER_DECODERS, _translated),
)
