"""Programs that train a model from half-precision weights, and do not know autoamp.

Each makes a model in the dtype that it is given, trains it, and gives it back.  Norms
begin at 1, and are trained by updates that a half weight near 1 cannot hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH, STEPS, RATE = 16, 20, 1e-3


class Net(nn.Module):
    """A layer, a norm and a head, whose weights are the same for each test."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.norm(self.layer(x))))
        return out


def adam(params: Any, **options: Any) -> optim.AdamW:
    return optim.AdamW(params, lr=RATE, weight_decay=0.0, **options)


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    of = torch.Generator().manual_seed(1)
    x = torch.randn(32, WIDTH, generator=of)
    return x.to(dtype), torch.randint(0, 4, (32,), generator=of)


def loss_of(model: nn.Module, dtype: torch.dtype) -> Tensor:
    x, y = batch(dtype)
    return nn.functional.cross_entropy(model(x).float(), y)


def loop(model: nn.Module, optimizer: Any, dtype: torch.dtype) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, dtype).backward()
        optimizer.step()


# -- programs: each makes a model in a dtype and trains it -----------------------------


def plain(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    loop(model, adam(model.parameters()), dtype)
    return model


def loaded_last(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    optimizer = adam(model.parameters())
    saved = {k: v.to(dtype) for k, v in Net().state_dict().items()}
    model.load_state_dict(saved, assign=True)
    optimizer.param_groups[0]["params"][:] = model.parameters()
    loop(model, optimizer, dtype)
    return model


def mapped(dtype: torch.dtype) -> Net:
    """The weights lie in a file's pages, which a write makes the process's own."""
    torch.save(Net().to(dtype).state_dict(), "weights")
    with torch.device("meta"):
        model = Net()
    model.load_state_dict(torch.load("weights", mmap=True), assign=True)
    loop(model, adam(model.parameters()), dtype)
    untouched = torch.load("weights")["norm.weight"]
    assert torch.equal(untouched, torch.ones(32, dtype=dtype))
    return model


def own_autocast(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    # Fp32 weights are cast once in a region, and would stay what they were.
    with torch.autocast("cpu", BF16 if dtype == FP32 else dtype, dtype != FP32):
        loop(model, adam(model.parameters()), dtype)
    return model


def own_scaler(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    optimizer, scaler = adam(model.parameters()), torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, dtype)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
    return model


def with_a_plateau(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    optimizer = adam(model.parameters())
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, dtype).backward()
        optimizer.step()
        scheduler.step(1.0)
        optimizer.param_groups[0]["lr"] = RATE
    return model


def weight_normed(dtype: torch.dtype) -> Net:
    model = Net()
    parametrizations.weight_norm(model.layer)
    parametrizations.spectral_norm(model.head)
    loop(model.to(dtype), adam(model.parameters()), dtype)
    return model


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 16))
        self.tell = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 1))


def adversaries(dtype: torch.dtype) -> Pair:
    pair = Pair().to(dtype)
    of = torch.Generator().manual_seed(1)
    makes, tells = adam(pair.make.parameters()), adam(pair.tell.parameters())
    entropy = nn.functional.binary_cross_entropy_with_logits
    real = torch.randn(32, WIDTH, generator=of) + 1
    yes, no = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(STEPS):
        made = pair.make(torch.randn(32, 8, generator=of).to(dtype))
        tells.zero_grad()
        loss = entropy(pair.tell(real.to(dtype)).float(), yes)
        (loss + entropy(pair.tell(made.detach()).float(), no)).backward()
        tells.step()
        makes.zero_grad()
        entropy(pair.tell(made).float(), yes).backward()
        makes.step()
    return pair


def compiled(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    ready: Any = torch.compile(model, disable=dtype == FP32)
    loop(ready, adam(model.parameters()), dtype)
    return model
