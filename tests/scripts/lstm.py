"""An LSTM that tells which of three rhythms a sequence has."""

import torch
from torch import nn

BATCH, LENGTH, STEPS = 32, 12, 30


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 24, batch_first=True)
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        outputs, _ = self.lstm(x)
        return self.head(outputs[:, -1])


def batch():
    labels = torch.randint(3, (BATCH,))
    time = torch.arange(LENGTH).view(1, LENGTH, 1)
    speed = torch.tensor([0.4, 1.0, 2.0])[labels].view(BATCH, 1, 1)
    phase = torch.arange(4).view(1, 1, 4) * 0.7
    return torch.sin(time * speed + phase) + 0.1 * torch.randn(BATCH, LENGTH, 4), labels


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for _ in range(STEPS):
    sequences, labels = batch()
    loss = nn.functional.cross_entropy(model(sequences), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())

RESULT = {"losses": losses, "params": list(model.parameters())}
