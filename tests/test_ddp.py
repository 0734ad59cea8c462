"""Ranks step together or not at all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autoamp

RANKS = 2
BAD_STEP = 1


def train(rank: int, folder: str, before: bool) -> None:
    """Three steps; in one of them rank 1's own part of the gradients overflows.

    It is clipped at once, in the hook that DDP reduces gradients after, so that no
    other rank ever sees it.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g.nan_to_num(1.0, 1.0, 1.0).clamp(-1, 1))
    options = {"precision": "bf16", "loss_scale": "dynamic", "do_no_harm": False}
    if before:
        model = autoamp.convert(model, strict=True, **options)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    if not before:
        ddp = autoamp.convert(ddp, **options)
    skipped, moved = [], []
    for step in range(3):
        old = [p.detach().clone() for p in ddp.parameters()]
        optimizer.zero_grad()
        factor = float("inf") if step == BAD_STEP and rank == 1 else 1.0
        (ddp(torch.full((4, 8), 1.0 + rank)).sum() * factor).backward()
        optimizer.step()
        skipped.append(bool(optimizer.step_was_skipped))
        moved.append(not all(map(torch.equal, old, ddp.parameters())))
    weights = [p.detach() for p in ddp.parameters()]
    torch.save((skipped, moved, weights), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path, before: bool) -> None:
    mp.spawn(train, (str(tmp_path), before), nprocs=RANKS)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for skipped, moved, weights in results:
        assert skipped == [step == BAD_STEP for step in range(3)]
        assert moved == [step != BAD_STEP for step in range(3)]
        assert all(map(torch.equal, weights, results[0][2]))
