"""Trains for ten steps and saves; run again, it goes on from where it was.

The checkpoint's path is the only argument.
"""

import os
import sys

import torch
from torch import nn

CHECKPOINT = sys.argv[1]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=generator)
    return x, torch.tanh(x[:, :1] - x[:, 1:2])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
start = 0
if os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]

losses = []
for step in range(start, start + 10):
    x, y = batch(step)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save({**state, "step": step + 1}, CHECKPOINT)

RESULT = {"losses": losses, "start": start, "params": list(model.parameters())}
