"""Language models of transformers: decoders, encoders, encoder-decoders."""

from __future__ import annotations

from functools import partial

from tests.models.case import Args, Case, labelled, tokens
from tests.models.hf import LENGTH, SEQUENCES, T5, causal, masked
from tests.models.tiny import VOCAB, rows, tiny

DECODERS = rows(
    """
gpt2 GPT2LMHeadModel
gpt_neo GPTNeoForCausalLM attention_types=[[["global", "local"], 1]]
gpt_j GPTJForCausalLM rotary_dim=4
gpt_neox GPTNeoXForCausalLM
opt OPTForCausalLM ffn_dim=96, word_embed_proj_dim=48
bloom BloomForCausalLM
mpt MptForCausalLM max_seq_len=64
falcon FalconForCausalLM
xglm XGLMForCausalLM ffn_dim=96
llama LlamaForCausalLM
mistral MistralForCausalLM sliding_window=8
mixtral MixtralForCausalLM num_local_experts=4, **experts
qwen2 Qwen2ForCausalLM
qwen3 Qwen3ForCausalLM head_dim=12
gemma GemmaForCausalLM head_dim=12
gemma2 Gemma2ForCausalLM head_dim=12, sliding_window=8
gemma3 Gemma3ForCausalLM head_dim=12, sliding_window=8
phi PhiForCausalLM
cohere CohereForCausalLM
deepseek_v3 DeepseekV3ForCausalLM q_lora_rank=16, kv_lora_rank=16, v_head_dim=8,
    qk_rope_head_dim=8, qk_nope_head_dim=8, n_routed_experts=4, n_group=2, topk_group=1,
    moe_intermediate_size=32, first_k_dense_replace=1, num_key_value_heads=4,
    head_dim=8, **experts
gpt_oss GptOssForCausalLM num_local_experts=4, head_dim=12, sliding_window=8, **experts
mamba MambaForCausalLM state_size=8, time_step_rank=4
rwkv RwkvForCausalLM attention_hidden_size=48
recurrent_gemma RecurrentGemmaForCausalLM lru_width=48, num_hidden_layers=3,
    attention_window_size=8, head_dim=12
xlnet XLNetLMHeadModel d_inner=96, d_head=12
""",
    experts={"num_experts_per_tok": 2},
)

ENCODERS = rows(
    """
bert BertForMaskedLM
roberta RobertaForMaskedLM
albert AlbertForMaskedLM embedding_size=24
distilbert DistilBertForMaskedLM hidden_dim=96
electra ElectraForMaskedLM embedding_size=24
deberta DebertaForMaskedLM **relative
deberta_v2 DebertaV2ForMaskedLM **relative
mobilebert MobileBertForMaskedLM embedding_size=24, intra_bottleneck_size=24,
    true_hidden_size=24
modernbert ModernBertForMaskedLM global_attn_every_n_layers=2, local_attention=8,
    pad_token_id=0
convbert ConvBertForMaskedLM embedding_size=48
squeezebert SqueezeBertForMaskedLM embedding_size=48
fnet FNetForMaskedLM tpu_short_seq_length=12
longformer LongformerForMaskedLM attention_window=4
xmod XmodForMaskedLM default_language="en_XX"
funnel FunnelForMaskedLM block_sizes=[1, 1], d_head=12, d_inner=96, num_decoder_layers=1
""",
    relative={"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
)

ENCODER_DECODERS = rows(
    """
t5 T5ForConditionalGeneration **t5
switch SwitchTransformersForConditionalGeneration **t5, num_layers=2,
    num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    num_experts=4
bart BartForConditionalGeneration **seq
pegasus PegasusForConditionalGeneration **seq
m2m_100 M2M100ForConditionalGeneration **seq
""",
    t5=T5,
    seq={"d_model": 48, **SEQUENCES},
)


def _translated(seed: int) -> Args:
    return (), {
        "input_ids": tokens(seed, 2, LENGTH, vocab=VOCAB),
        "labels": tokens(seed + 500, 2, 8, vocab=VOCAB),
    }


CASES = tuple(
    Case(name, partial(tiny, model, **settings), inputs, labelled)
    for table, inputs in (
        (DECODERS, causal),
        (ENCODERS, masked),
        (ENCODER_DECODERS, _translated),
    )
    for name, model, settings in table
)
