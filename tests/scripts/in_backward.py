"""An optimizer for each parameter, which steps in the middle of the backward."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
)
optimizers = {
    p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()
}


def step_one(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in optimizers:
    parameter.register_post_accumulate_grad_hook(step_one)
losses = []
for _ in range(6):
    loss = nn.functional.mse_loss(model(torch.randn(16, 8)), torch.randn(16, 2))
    loss.backward()
    losses.append(loss.item())

RESULT = {"losses": losses, "params": list(model.parameters())}
