"""A LoRA adapter on GPT-2: trained, evaluated, merged, unmerged, saved and loaded."""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

OPTIONS = {"mixed": "no", "folder": "", **dict(a.split("=", 1) for a in sys.argv[1:])}


def base():
    torch.manual_seed(0)
    shape = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32}
    special = {"bos_token_id": 62, "eos_token_id": 63, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, **shape, **special))


def evaluate(model):
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", enabled=OPTIONS["mixed"] == "bf16"):
        found = model(input_ids=ids, labels=ids).loss.item()
    model.train()
    return found


ids = (torch.arange(12) + 7 * torch.arange(8)[:, None]) % 60
lora = LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
model = get_peft_model(base(), lora)
frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)

losses = []
for _ in range(10):
    with torch.autocast("cpu", enabled=OPTIONS["mixed"] == "bf16"):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

named = dict(model.named_parameters())
assert all(torch.equal(named[name], weight) for name, weight in frozen.items())

losses.append(evaluate(model))
model.merge_adapter()
losses.append(evaluate(model))
model.unmerge_adapter()
losses.append(evaluate(model))
with model.disable_adapter():
    losses.append(evaluate(model))
model.save_pretrained(OPTIONS["folder"])
losses.append(evaluate(PeftModel.from_pretrained(base(), OPTIONS["folder"])))

RESULT = {"losses": losses, "params": named, "model": model, "optimizer": optimizer}
