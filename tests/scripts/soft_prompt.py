"""A soft prompt is trained before a frozen model with attention."""

import torch
from torch import nn
from torch.nn import functional as F


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x):
        heads = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return self.head(self.norm(x).mean(1))


torch.manual_seed(0)
model = Encoder().requires_grad_(False)
prompt = nn.Parameter(torch.randn(4, 16))
optimizer = torch.optim.Adam([prompt], lr=0.1)
losses = []
for _ in range(6):
    joined = torch.cat([prompt.expand(8, -1, -1), torch.randn(8, 5, 16)], dim=1)
    loss = F.cross_entropy(model(joined), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_([prompt], 0.5)
    optimizer.step()
    losses.append(loss.item())

RESULT = {"losses": losses, "params": [prompt, *model.parameters()]}
