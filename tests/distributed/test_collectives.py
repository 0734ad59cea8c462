"""How many collectives a training step makes: the guard adds none, or one small one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.distributed.ranks import Ranks
from tests.distributed.test_fsdp import sharded
from tests.distributed.traffic import Collective, collectives
from tests.distributed.training import Net, batch
from tests.quick import some_slow

STEPS, SETTLED = 6, 4
"""All steps, and those after which FSDP2's units have agreed on how to gather."""


def made(rank: int, wrap: str, precision: str) -> list[list[Collective]]:
    """The collectives of each step, with one overflow of rank 1."""
    net: nn.Module = Net()
    if precision != "no":
        autoamp.convert(net, precision=precision, do_no_harm=False)
    net = DistributedDataParallel(net) if wrap == "ddp" else sharded(net=net)
    sgd = torch.optim.SGD(net.parameters(), 0.01)
    found = []
    for step in range(STEPS):
        x, y = batch(step, rank)
        with collectives() as seen:
            loss = nn.functional.mse_loss(net(x), y)
            bad = step == SETTLED and rank == 1 and precision != "no"
            (loss * torch.inf if bad else loss).backward()
            if wrap == "ddp":  # FSDP reduces the norm by a small collective, too
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            sgd.step()
            sgd.zero_grad()
        assert bool(getattr(sgd, "step_was_skipped", False)) == (
            step == SETTLED and precision != "no"
        )
        found.append(seen)
    return found


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_step_of_ddp_makes_no_collective_more(precision: str, two: Ranks) -> None:
    plain, ours = (two.run(made, "ddp", p) for p in ("no", precision))
    assert all(any(step) for step in plain[0])
    assert ours == plain


# In CI fp16, of which the ranks agree on the scale as well.
@pytest.mark.parametrize("precision", some_slow(["fp16", "bf16"], "bf16".__eq__))
def test_a_step_of_fsdp2_makes_one_small_collective_more(
    precision: str, two: Ranks
) -> None:
    plain, ours = (two.run(made, "fsdp", p) for p in ("no", precision))
    for ranks_plain, ranks_ours in zip(plain, ours, strict=True):
        for after in ranks_ours:
            assert after.count(Collective("all_reduce", 1)) == 1
        for before, after in [*zip(ranks_plain, ranks_ours, strict=True)][SETTLED:]:
            # What is gathered low has other sizes.
            names = [each.name for each in before]
            assert [each.name for each in after] == [*names, "all_reduce"]
