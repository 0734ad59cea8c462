"""Two hundred steps on several ranks end where those in fp32 end."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.distributed.ranks import Ranks
from tests.distributed.test_fsdp import sharded
from tests.distributed.training import Net, batch

pytestmark = pytest.mark.slow

STEPS, LAST, SEEDS = 200, 40, 4


def curve(rank: int, wrap: str, mixed: str, seed: int) -> float:
    """The mean loss of the last steps of one training."""
    torch.manual_seed(seed)
    net: nn.Module = Net()
    if mixed in ("bf16", "fp16"):
        autoamp.convert(net, precision=mixed, do_no_harm=False)
    wrapped = {"ddp": DistributedDataParallel, "fsdp": lambda net: sharded(net=net)}
    net = wrapped.get(wrap, in_two_dimensions)(net)
    # Weights of both meshes, and of one, cannot be stepped together.
    together = None if wrap in wrapped else False
    adam = torch.optim.AdamW(net.parameters(), lr=3e-3, foreach=together)
    of = rank if wrap in wrapped else rank // 2  # ranks of one model share their data
    batches = [batch(step, of, 64) for step in range(STEPS)]
    losses = []
    for x, y in batches:  # without a look at the weights, which would be gathered
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return statistics.mean(losses[-LAST:])


def in_two_dimensions(net: Any) -> nn.Module:
    """Blocks split over two ranks, and sharded over the other two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    return net


@pytest.mark.parametrize(
    ("wrap", "world"),
    [("ddp", "two"), ("fsdp", "two"), ("ddp", "four"), ("tp", "four")],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_are_within_noise_of_fp32s(
    wrap: str, world: str, precision: str, request: pytest.FixtureRequest
) -> None:
    """Noise is how far fp32's own runs from other weights are apart."""
    ranks: Ranks = request.getfixturevalue(world)

    def ends(mixed: str) -> list[float]:
        return [
            statistics.mean(ranks.run(curve, wrap, mixed, seed, deadline=240))
            for seed in range(2 if wrap == "tp" else SEEDS)  # four minutes for four
        ]

    plain, ours = ends("no"), ends(precision)
    noise = statistics.stdev(plain)
    apart = [abs(a - b) for a, b in zip(plain, ours, strict=True)]
    print(f"fp32 {plain}, {precision} {ours}, noise {noise:.1e}")
    assert plain != ours
    assert max(apart) < noise
    assert statistics.mean(plain) < 1.0  # it has learned
