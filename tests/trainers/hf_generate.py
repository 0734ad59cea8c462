"""Greedy `generate()`: decoders with a cache, and an encoder called by itself."""

import contextlib
import sys

import torch
import transformers as hf

OPTIONS = {"mixed": "no", **dict(a.split("=", 1) for a in sys.argv[1:])}
VOCAB = 64
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2():
    shape = {"n_embd": 48, "n_layer": 1, "n_head": 4, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, **shape, **SPECIAL))


def llama():
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4}
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_key_value_heads": 2}
    config = hf.LlamaConfig(vocab_size=VOCAB, **shape, **sizes, **SPECIAL)
    return hf.LlamaForCausalLM(config)


def t5():
    shape = {"num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    sizes = {"d_model": 48, "d_ff": 96, "d_kv": 12}
    special = {"pad_token_id": 0, "eos_token_id": 2}
    # Or an untrained model would say one token over and over.
    factor = 1.0 if int(OPTIONS["steps"]) else 4.0
    config = hf.T5Config(
        vocab_size=VOCAB, **shape, **sizes, **special, initializer_factor=factor
    )
    return hf.T5ForConditionalGeneration(config)


MODELS = {"gpt2": gpt2, "llama": llama, "t5": t5}


def autocast():
    mixed = OPTIONS["mixed"] == "bf16"
    return torch.autocast("cpu") if mixed else contextlib.nullcontext()


def train_a_little(model):
    """Or the likeliest token would be ahead of the next by a rounding error."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(int(OPTIONS["steps"])):
        ids = 3 + (torch.arange(4)[:, None] * 5 + torch.arange(24) + step) % 60
        with autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


torch.manual_seed(0)
model = MODELS[OPTIONS["model"]]()
train_a_little(model)
model.eval()
prompt = torch.tensor([[5, 6, 7, 8], [40, 41, 42, 43]])
with autocast():
    tokens = model.generate(prompt, max_new_tokens=12, do_sample=False)
RESULT = {"tokens": tokens.tolist(), "model": model}
