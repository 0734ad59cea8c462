"""LBFGS, which calls a closure several times in each step."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
x = torch.randn(128, 8)
y = torch.sin((x * torch.randn(8)).sum(1, keepdim=True) / 2)
optimizer = torch.optim.LBFGS(
    model.parameters(), lr=0.3, max_iter=5, history_size=5, tolerance_change=0
)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


losses = [optimizer.step(closure).item() for _ in range(6)]

RESULT = {"losses": losses, "params": list(model.parameters())}
