"""A transformer trained on batches of lengths that change at each step."""

import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
model = nn.Sequential(
    nn.Embedding(500, 128), nn.TransformerEncoder(layer, 3), nn.Linear(128, 500)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(60):
    ids = torch.randint(0, 500, (8, int(torch.randint(8, 64, ()))))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
print(loss.item())
