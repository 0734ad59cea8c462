"""Gradients accumulated over four micro-batches before each step."""

import torch
from torch import nn

MICRO_BATCHES = 4

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()
)
head = nn.Linear(64, 1)
teacher = torch.randn(16) / 4
everything = [*model.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(everything, lr=3e-3)

losses = []
for _ in range(20):
    total = 0.0
    for _ in range(MICRO_BATCHES):
        x = torch.randn(16, 16)
        y = torch.tanh((x * teacher).sum(1, keepdim=True))
        loss = nn.functional.mse_loss(head(model(x)), y) / MICRO_BATCHES
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(total)

RESULT = {"losses": losses, "params": everything}
