"""An average of the weights is kept, and swapped in through `.data` to evaluate."""

import torch
from torch import nn

DECAY = 0.8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
averages = [p.detach().clone() for p in model.parameters()]
direction = torch.randn(8) / 2
test_x = torch.randn(64, 8)


def target(x):
    return torch.relu((x * direction).sum(1, keepdim=True))


test_y = target(test_x)


def swap():
    """Exchanges the weights and their averages; done twice, all is as before."""
    for i, parameter in enumerate(model.parameters()):
        parameter.data, averages[i] = averages[i], parameter.data


def error():
    model.eval()
    with torch.no_grad():
        found = nn.functional.mse_loss(model(test_x), test_y).item()
    model.train()
    return found


losses, averaged, trained = [], [], []
for _ in range(25):
    x = torch.randn(32, 8)
    loss = nn.functional.mse_loss(model(x), target(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for average, parameter in zip(averages, model.parameters(), strict=True):
        average.lerp_(parameter.data, 1 - DECAY)
    trained.append(error())
    swap()
    averaged.append(error())
    swap()
    losses.append(loss.item())

RESULT = {
    "losses": losses,
    "averaged": averaged,
    "trained": trained,
    "params": [*model.parameters(), *averages],
}
