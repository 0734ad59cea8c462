"""Weights are put away between steps, and their memory is given back."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
weights, away, losses = list(model.parameters()), [], []


def fetch():
    for parameter, kept in zip(weights, away, strict=False):
        parameter.untyped_storage().resize_(kept.numel() * kept.element_size())
        parameter.data.copy_(kept)


for _ in range(6):
    fetch()
    loss = nn.functional.mse_loss(model(torch.randn(16, 8)), torch.randn(16, 2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    away = [parameter.detach().clone() for parameter in weights]
    for parameter in weights:
        parameter.untyped_storage().resize_(0)
fetch()

RESULT = {"losses": losses, "params": weights}
