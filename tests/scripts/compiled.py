"""A model and a function, each compiled by the script with torch.compile.

The backend is the only argument.
"""

import sys

import torch
from torch import nn

BACKEND = sys.argv[1]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16))
head = nn.Parameter(torch.randn(16, 1) / 4)
bias = nn.Parameter(torch.zeros(1))
everything = [*model.parameters(), head, bias]
fast = torch.compile(model, backend=BACKEND)


@torch.compile(backend=BACKEND)
def predict(features, head, bias):
    return torch.tanh(features @ head + bias)


optimizer = torch.optim.Adam(everything, lr=1e-2)
direction = torch.randn(8) / 2
losses = []
for _ in range(20):
    x = torch.randn(32, 8)
    y = torch.tanh((x * direction).sum(1, keepdim=True))
    loss = nn.functional.mse_loss(predict(fast(x), head, bias), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

RESULT = {"losses": losses, "params": everything}
