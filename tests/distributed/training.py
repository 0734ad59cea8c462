"""A model, its data, and a loop that trains it on one rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp

WIDTH, WIDE, ROWS = 16, 32, 8


class Block(nn.Module):
    """A residual block as in a transformer, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks between two linears, and a branch that some calls leave out."""

    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDE)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.branch = nn.Linear(WIDE, WIDE) if branch else None
        self.last = nn.Linear(WIDE, 4)

    def forward(self, x: Tensor, through_branch: bool = False) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if through_branch and self.branch is not None:
            x = x + self.branch(x)
        return self.last(x)


def batch(step: int, rank: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """The inputs and targets of one step on one rank, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, x[:, :4].roll(1, -1) * x[:, 4:8]


@dataclass
class Trained:
    """What happened in a training on one rank, one entry a step."""

    losses: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    bad: Iterable[int] = (),
    factor: float = math.inf,
    call: Callable[..., Tensor] | None = None,
    accumulate: Callable[[int], AbstractContextManager[Any]] | None = None,
    autocast: bool = False,
) -> Trained:
    """Trains `model` by one step a batch.

    Args:
        bad: the steps in which this rank's gradients overflow.
        factor: what the loss of such a step is multiplied by.
        call: called in the place of the model.
        accumulate: gives a region for each batch in which a first part of the batch is
            run, whose gradients are not to be reduced.
        autocast: runs under `torch.autocast` in bf16.
    """
    trained, bad = Trained(), set(bad)
    for step, (x, y) in enumerate(batches):
        halves = [(x, y)]
        if accumulate is not None:
            halves = [*zip(x.chunk(2), y.chunk(2), strict=True)]
        for at, (given, wanted) in enumerate(halves):
            last = at == len(halves) - 1
            region = contextlib.nullcontext() if last else accumulate(step)
            with region:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = nn.functional.mse_loss((call or model)(given), wanted)
                (loss * factor if step in bad else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.losses.append(loss.item())
        trained.skipped.append(was_skipped(optimizer))
        trained.weights.append([w.item() for w in sums(model)])
        trained.scales.append(scale_of(model))
    return trained


def scale_of(model: nn.Module) -> float:
    """The loss scale of a converted model; 1 for any other."""
    try:
        scale = autoamp.report(model).loss_scale
    except autoamp.UnsupportedModelError:
        return 1.0
    return 1.0 if scale is None else scale.scale


def was_skipped(optimizer: Any) -> bool:
    """Whether the last step of `optimizer`, or of the one inside it, was skipped."""
    inner = getattr(optimizer, "optim", optimizer)
    marks = [getattr(o, "step_was_skipped", False) for o in (optimizer, inner)]
    return any(bool(mark) for mark in marks)


def sums(model: nn.Module) -> Iterator[Tensor]:
    """One number of each parameter, of all of it where it is sharded."""
    for p in model.parameters():
        value: Any = p.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        yield (value.double() * torch.arange(1, value.numel() + 1).view_as(value)).sum()


def zero_adamw(model: nn.Module) -> Any:
    """AdamW whose state is spread over the ranks."""
    # Its import warns of TorchScript, which the tests of this process make an error.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


def slow(names: Iterable[str], *quick: str) -> list[Any]:
    """`names` as cases of a test, all of them slow but for the `quick` ones."""
    marks = pytest.mark.slow
    return [n if n in quick else pytest.param(n, marks=marks) for n in names]


def impatient() -> None:
    """Ranks that wait for others in the greeting give up after two seconds."""
    from autoamp.training import ranks

    ranks.PATIENCE = 2.0
