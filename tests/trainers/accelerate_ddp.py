"""accelerate on two processes under torchrun; its scheduler holds at skipped steps."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OPTIONS = {"mixed": "no", "bad": "-1", **dict(a.split("=", 1) for a in sys.argv[1:])}

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(80, 16)
y = x[:, :4].roll(1, 1) * x[:, 4:8] / 4
loader = DataLoader(TensorDataset(x, y), batch_size=4)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
accelerator = Accelerator(cpu=True, mixed_precision=OPTIONS["mixed"])
rank = accelerator.process_index
steps = accelerator.prepare(model, optimizer, loader, scheduler)
model, optimizer, loader, scheduler = steps


def sum_of_weights():
    return sum(p.detach().double().sum().item() for p in model.parameters())


losses, weights, rates, skipped = [], [sum_of_weights()], [], []
for step, (inputs, targets) in enumerate(loader):
    loss = nn.functional.mse_loss(model(inputs), targets)
    # One rank alone sees the bad batch, where one is asked for.
    bad = rank == 1 and step == int(OPTIONS["bad"])
    accelerator.backward(loss * 1e36 if bad else loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    weights.append(sum_of_weights())
    rates.append(scheduler.get_last_lr()[0])
    skipped.append(bool(accelerator.optimizer_step_was_skipped))

RESULT = {
    "losses": losses,
    "weights": weights,
    "rates": rates,
    "skipped": skipped,
    "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
}
torch.save(RESULT, f"{OPTIONS['folder']}/{rank}.pt")
del optimizer, steps
accelerator.wait_for_everyone()
accelerator.end_training()
