"""Small trainings that are recorded, for the tests of `autoamp compare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.flight import ring

STEPS = 12


class Net(nn.Module):
    """A model with dropout, so that random numbers count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.drop, self.second = nn.Dropout(0.1), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.drop(self.norm(self.first(x)).relu()))
        return found


Bug = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def train(record: Path, precision: str = "bf16", **given: Any) -> Path:
    """Trains with a record of each step, as `trained` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOAMP_RECORD_EVERY", "1")
        return trained(record, precision, **given)


def trained(
    record: Path,
    precision: str = "bf16",
    *,
    bug: Bug | None = None,
    data: Callable[[int], int] = lambda step: step,
    model: Callable[[], nn.Module] = Net,
    seeds: tuple[int, int] = (0, 0),
    steps: int = STEPS,
    scale: Callable[[int], float] = lambda _: 1.0,
    **options: Any,
) -> Path:
    """Trains and records.

    Args:
        precision: `fp32` keeps every module in fp32.
        bug: called before each step's forward.
        data: the number of the batch of a step.
        seeds: of the weights, and of dropout.
        scale: what the loss of a step is multiplied by.
    """
    if precision == "fp32":
        precision, options = "bf16", {**options, "keep": ["*"]}
    torch.manual_seed(seeds[0])
    net = autoamp.convert(
        model(), precision=precision, do_no_harm=False, record=record, **options
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(seeds[1])
    for step in range(1, steps + 1):
        if bug is not None:
            bug(step, net, optimizer)
        draw = torch.Generator().manual_seed(data(step))
        x = torch.randn(8, 16, generator=draw)
        optimizer.zero_grad()
        loss = (net(x) - x[:, :4].sin()).square().mean() * scale(step)
        loss.backward()
        optimizer.step()
    autoamp.revert(net)
    return record


def made(
    root: Path, losses: list[Any], *, rank: int = 0, run: str = "run", **header: Any
) -> Path:
    """A run whose ring has these losses, one a step; a dict is a whole record."""
    home = root / run / f"rank-{rank:05d}"
    home.mkdir(parents=True)
    about = {"rank": rank, "label": "Net", "parameters": {"w": [[2], "float32"]}}
    about["options"] = {"precision": "bf16"}
    file = ring.Ring(home / "ring", {"format": 1, "torch": "2", **about, **header})
    for step, loss in enumerate(losses, 1):
        noted = loss if isinstance(loss, dict) else {"loss": loss}
        file.write({"kind": "step", "step": step, "batch": "b", **noted})
    file.close()
    return root
