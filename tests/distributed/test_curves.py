"""Two hundred steps on several ranks end where those in fp32 end."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.distributed.ranks import Ranks
from tests.distributed.test_fsdp import sharded
from tests.distributed.training import Net, batch, steps

pytestmark = pytest.mark.slow

STEPS, LAST, SEEDS = 200, 40, 4


def curve(rank: int, wrap: str, mixed: str, seed: int) -> float:
    """The mean loss of the last steps of one training."""
    torch.manual_seed(seed)
    net: nn.Module = Net()
    if mixed in ("bf16", "fp16"):
        autoamp.convert(net, precision=mixed, do_no_harm=False)
    net = DistributedDataParallel(net) if wrap == "ddp" else sharded(net=net)
    adam = torch.optim.AdamW(net.parameters(), lr=3e-3)
    batches = [batch(step, rank, 64) for step in range(STEPS)]
    trained = steps(net, adam, batches, autocast=mixed == "autocast")
    return statistics.mean(trained.losses[-LAST:])


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_are_within_noise_of_fp32s(
    wrap: str, precision: str, two: Ranks
) -> None:
    """Noise is how far fp32's own runs from other weights are apart."""

    def ends(mixed: str) -> list[float]:
        return [
            statistics.mean(two.run(curve, wrap, mixed, seed, deadline=120))
            for seed in range(SEEDS)
        ]

    plain, ours = ends("no"), ends(precision)
    noise = statistics.stdev(plain)
    apart = [abs(a - b) for a, b in zip(plain, ours, strict=True)]
    print(f"fp32 {plain}, {precision} {ours}, noise {noise:.1e}")
    assert plain != ours
    assert max(apart) < noise
    assert statistics.mean(plain) < 1.0  # it has learned
