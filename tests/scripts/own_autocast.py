"""Already in mixed precision: torch.autocast, and a GradScaler for fp16.

The precision is the only argument, "bf16" or "fp16".
"""

import sys

import torch
from torch import nn

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}[sys.argv[1]]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", enabled=LOW is torch.float16)
direction = torch.randn(8) / 2

losses = []
for _ in range(20):
    x = torch.randn(32, 8)
    y = torch.tanh((x * direction).sum(1, keepdim=True))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=LOW):
        predicted = model(x)
        loss = nn.functional.mse_loss(predicted.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

RESULT = {
    "losses": losses,
    "params": list(model.parameters()),
    "predicted": predicted.detach(),
    "scale": scaler.get_scale(),
}
