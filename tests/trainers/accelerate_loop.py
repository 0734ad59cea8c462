"""A loop under accelerate: alone, with accumulated gradients, or on two ranks.

Its scheduler holds at skipped steps.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OPTIONS = {
    "mixed": "no",
    "bad": "-1",
    "compile": "no",
    "ranks": "1",
    **dict(a.split("=", 1) for a in sys.argv[1:]),
}
ALONE = OPTIONS["ranks"] == "1"

torch.manual_seed(0)
x = torch.randn(80, 16)
y = x[:, :4].roll(1, 1) * x[:, 4:8]
loader = DataLoader(TensorDataset(x, y), batch_size=4)
model = nn.Sequential(
    nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()
)
model.append(nn.Linear(64, 4))
inner = model
if OPTIONS["compile"] == "method":
    model.compile(backend="aot_eager")
elif OPTIONS["compile"] == "function":
    model = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
accelerator = Accelerator(
    cpu=True,
    mixed_precision=OPTIONS["mixed"],
    gradient_accumulation_steps=2 if ALONE else 1,
)
rank = accelerator.process_index
steps = accelerator.prepare(model, optimizer, loader, scheduler)
model, wrapper, loader, scheduler = steps


def sum_of_weights():
    return sum(p.detach().double().sum().item() for p in inner.parameters())


losses, weights, rates, skipped = [], [sum_of_weights()], [], []
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs), targets)
        # Of two ranks one alone sees the bad batch, where one is asked for.
        bad = len(weights) - 1 == int(OPTIONS["bad"]) and (ALONE or rank == 1)
        accelerator.backward(loss * torch.inf if bad else loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        wrapper.step()
        scheduler.step()
        wrapper.zero_grad()
    losses.append(loss.item())
    if accelerator.sync_gradients:
        weights.append(sum_of_weights())
        rates.append(scheduler.get_last_lr()[0])
        skipped.append(bool(accelerator.optimizer_step_was_skipped))

RESULT = {
    "losses": losses,
    "params": dict(inner.named_parameters()),
    "weights": weights,
    "rates": rates,
    "model": inner,
    "optimizer": optimizer,
    "wrapper": wrapper,
}
if not ALONE:
    told = {name: RESULT[name] for name in ("losses", "weights", "rates")}
    told["dtypes"] = sorted({str(p.dtype) for p in inner.parameters()})
    torch.save({**told, "skipped": skipped}, f"{OPTIONS['folder']}/{rank}.pt")
    del RESULT, optimizer, wrapper, steps
    accelerator.wait_for_everyone()
    accelerator.end_training()
