"""An LSTM that classifies packed sequences of many lengths."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(200, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, 2)

    def forward(self, sequences):
        packed = pack_sequence([self.words(s) for s in sequences], enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.head(torch.cat([h[0], h[1]], 1))


model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(50):
    sequences = [torch.randint(0, 200, (n,)) for n in torch.randint(5, 40, (32,))]
    labels = torch.tensor([int(s[0] > 99) for s in sequences])
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(sequences), labels)
    loss.backward()
    optimizer.step()
print(loss.item())
