"""GPT-2's `generate` on prompts of several lengths, greedily."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(n_layer=6, n_embd=384, n_head=6, vocab_size=5000)
model = GPT2LMHeadModel(config).eval()
total = 0
for length in (5, 9, 17, 30):
    prompt = torch.randint(0, 5000, (2, length))
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=60,
        do_sample=False,
        pad_token_id=0,
    )
    total += int(made.sum())
print(total)
