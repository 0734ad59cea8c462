"""The guard among ranks: all of them skip a step in bf16, or none does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.distributed.ranks import RankError, Ranks
from tests.distributed.test_fsdp import sharded
from tests.distributed.training import Net, Trained, batch, steps
from tests.small_models import BF16


def spoiled(rank: int, wrap: str, where: str) -> tuple[Trained, list[float]]:
    """Trains; in step 1 the loss of rank 0, or its shard of a gradient, is bad."""
    net: nn.Module = Net()
    autoamp.convert(net, **BF16)
    net = DistributedDataParallel(net) if wrap == "ddp" else sharded(net=net)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    trained = Trained()
    for step in range(3):
        bad = step == 1 and where == "loss" and rank == 0
        x, y = batch(step, rank)
        loss = nn.functional.mse_loss(net(x), y)
        (loss * math.inf if bad else loss).backward()
        if step == 1 and where == "shard" and rank == 0:
            grad: Any = next(net.parameters()).grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            local.view(-1)[0] = math.nan
        optimizer.step()
        optimizer.zero_grad()
        trained.skipped.append(bool(getattr(optimizer, "step_was_skipped", False)))
    values = []
    for p in net.parameters():
        full = p.full_tensor() if hasattr(p, "full_tensor") else p
        values.append(full.sum().item())
    return trained, values


@pytest.mark.parametrize(
    ("wrap", "where"), [("ddp", "loss"), ("fsdp", "loss"), ("fsdp", "shard")]
)
def test_every_rank_skips_the_same_steps(wrap: str, where: str, two: Ranks) -> None:
    (first, values), (second, others) = two.run(spoiled, wrap, where)
    assert first.skipped == second.skipped == [False, True, False]
    assert all(map(math.isfinite, values))
    assert values == others


def disagreeing(rank: int) -> Trained:
    net: nn.Module = autoamp.convert(Net(), **BF16, guard=rank == 0)
    net = DistributedDataParallel(net)
    sgd = torch.optim.SGD(net.parameters(), 0.01)
    return steps(net, sgd, [batch(step, rank) for step in range(2)])


def test_a_guard_on_one_rank_alone_is_an_error(two: Ranks) -> None:
    with pytest.raises(RankError, match="guard: on on rank 0; off on rank 1"):
        two.run(disagreeing)
