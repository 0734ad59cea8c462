"""transformers' Trainer, on a causal language model with LoRA of peft."""

from _way import arguments, callbacks, torch, trained
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(
    GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4)
)
lora = LoraConfig(r=8, target_modules=["c_attn", "c_fc"], lora_dropout=0.0)
tokens = torch.arange(32).add(torch.arange(128)[:, None]).remainder(128)
trained(
    Trainer(
        get_peft_model(model, lora),
        arguments(TrainingArguments, batch=16, lr=1e-2),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=callbacks(),
    )
)
