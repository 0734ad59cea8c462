"""trl's DPOTrainer, on a small Llama and a copy of it as the reference."""

import copy

from _way import arguments, callbacks, tokenizer, torch, trained
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer

config = LlamaConfig(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    eos_token_id=2,
)
model = LlamaForCausalLM(config)
names = ("prompt", "chosen", "rejected")
rows = torch.randint(97, (64, 3, 4)).tolist()
texts = [[" ".join(map(str, part)) for part in row] for row in rows]
trained(
    DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=arguments(DPOConfig, batch=8, lr=1e-3, gradient_checkpointing=False),
        train_dataset=Dataset.from_list(
            [dict(zip(names, text, strict=True)) for text in texts]
        ),
        processing_class=tokenizer(97),
        callbacks=callbacks(),
    )
)
