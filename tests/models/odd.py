"""Small models that each hold one thing a rewriting pass can get wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from .case import Args, Case, distance, generator, normal


def mlp(width: int = 32) -> nn.Module:
    """Three linear layers with GELU between them."""
    return nn.Sequential(
        nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )


def weight_normed() -> nn.Module:
    """A convolution and a linear layer whose weights are computed at each call."""
    return nn.Sequential(
        weight_norm(nn.Conv1d(8, 16, 3, padding=1)),
        nn.ReLU(),
        nn.Flatten(),
        weight_norm(nn.Linear(16 * 12, 10)),
    )


class Checkpointed(nn.Module):
    """Two checkpointed blocks with dropout inside: the recompute must repeat it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, width)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class RoundThrough(torch.autograd.Function):
    """Rounds to a quarter; its gradient is the identity inside [-2, 2]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() <= 2).to(grads[0].dtype)


class StraightThrough(nn.Module):
    """Parameters before and after a custom Function whose true derivative is zero."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.before = nn.Linear(width, 64)
        self.after = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(RoundThrough.apply(self.before(x)))


class FourierLayer(nn.Module):
    """A learned complex filter applied between `rfft2` and `irfft2`."""

    def __init__(self, width: int = 8, size: int = 12) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 1)
        shape = (width, size, size // 2 + 1)
        self.filter = nn.Parameter(torch.randn(*shape, dtype=torch.cfloat) * 0.5)
        self.exit = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        spectrum = torch.fft.rfft2(x, norm="ortho") * self.filter
        y = torch.fft.irfft2(spectrum, s=x.shape[-2:], norm="ortho")
        return self.exit(functional.gelu(x + y))


class Branching(nn.Module):
    """The branch taken depends on the data, so the model is several graphs."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Linear(width, 48)
        self.positive = nn.Linear(48, 48)
        self.negative = nn.Linear(48, 48)
        self.exit = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        # On x, not on h, so that rounding cannot change the branch.
        if x.sum() > 0:
            h = torch.tanh(self.positive(h))
        else:
            h = torch.sigmoid(self.negative(h))
        return self.exit(h)


def _signed(seed: int) -> Args:
    x = torch.randn(4, 32, generator=generator(seed))
    return (x + (0.5 if seed % 2 == 0 else -0.5),), {}


class InPlace(nn.Module):
    """Writes into a slice, counts its calls and keeps a running average."""

    steps: Tensor
    average: Tensor

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.side = nn.Linear(width, 4)
        self.exit = nn.Linear(width, 10)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        y = torch.sigmoid(self.side(x))
        h[..., :4] = y
        self.steps += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.exit(h - self.average)


def _tags(*names: str) -> frozenset[str]:
    return frozenset(names)


CASES = (
    Case("mlp", mlp, normal(8, 32), distance),
    Case("weight_norm", weight_normed, normal(4, 8, 12), distance),
    Case(
        "checkpoint",
        Checkpointed,
        normal(4, 32),
        distance,
        _tags("checkpoint", "dropout"),
    ),
    Case("straight_through", StraightThrough, normal(8, 32), distance),
    Case("fourier", FourierLayer, normal(2, 3, 12, 12), distance),
    Case("branching", Branching, _signed, distance, _tags("breaks")),
    Case("in_place", InPlace, normal(4, 32), distance, _tags("stateful")),
)
