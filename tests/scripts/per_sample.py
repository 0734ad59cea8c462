"""Training on clipped per-sample gradients, from functional_call, grad and vmap."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
parameters = dict(model.named_parameters())
optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
direction = torch.randn(8) / 2


def loss_of_one(weights, x, y):
    return nn.functional.mse_loss(functional_call(model, weights, (x,)), y)


per_sample = vmap(grad_and_value(loss_of_one), in_dims=(None, 0, 0))

losses = []
for _ in range(25):
    x = torch.randn(32, 8)
    y = torch.tanh((x * direction).sum(1, keepdim=True))
    weights = {name: p.detach() for name, p in parameters.items()}
    grads, values = per_sample(weights, x, y)
    norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    factors = (1.0 / norms).clamp(max=1.0)
    for name, parameter in parameters.items():
        shape = (-1, *[1] * parameter.ndim)
        parameter.grad = (factors.view(shape) * grads[name]).mean(0)
    optimizer.step()
    losses.append(values.mean().item())

RESULT = {"losses": losses, "params": list(parameters.values())}
