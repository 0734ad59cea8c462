"""A plain loop over a model inside one of the wrappers torch has."""

import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

OPTIONS = {"mixed": "no", "wrap": "", **dict(a.split("=", 1) for a in sys.argv[1:])}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.wide, self.back = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.back(nn.functional.gelu(self.wide(self.norm(x))))


torch.manual_seed(0)
x = torch.randn(10, 8, 16)
y = x[..., :4].roll(1, -1) * x[..., 4:8]
inner = nn.Sequential(nn.Linear(16, 32), Block(), Block(), nn.Linear(32, 4))
model, average = inner, None
if OPTIONS["wrap"] == "data_parallel":
    model = nn.DataParallel(inner)
elif OPTIONS["wrap"] == "averaged":
    average = AveragedModel(inner, use_buffers=False)
elif OPTIONS["wrap"] == "compile_method":
    model.compile(backend="aot_eager")
elif OPTIONS["wrap"] == "compile":
    model = torch.compile(inner, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

losses = []
for inputs, targets in zip(x, y, strict=True):
    with torch.autocast("cpu", enabled=OPTIONS["mixed"] == "bf16"):
        loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if average is not None:
        average.update_parameters(inner)

RESULT = {
    "losses": losses,
    "params": dict(inner.named_parameters()),
    "model": inner,
    "optimizer": optimizer,
}
if average is not None:
    update_bn(x, average)
    average.eval()
    with torch.no_grad():
        RESULT["average"] = average(x[0])
    RESULT["averages"] = dict(average.module.named_parameters())
