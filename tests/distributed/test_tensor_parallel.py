"""Models whose weights are DTensors run under autocast, and say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import autoamp
from tests.distributed.ranks import RankError, Ranks
from tests.distributed.training import Net, Trained, batch, steps
from tests.small_models import BF16
from tests.trainers.harness import bound


def parallel(world: int, replicas: int = 1) -> nn.Module:
    """A net with tensor-parallel blocks, sharded over `replicas` by FSDP."""
    net = Net()
    shape = (replicas, world // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], plan)
    if replicas > 1:
        for block in net.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
    return net


def train(
    rank: int, world: int, mixed: str, *, replicas: int = 1, **options: Any
) -> tuple[Trained, list[str]]:
    """Five steps with Adam, and why parts of the model were not converted."""
    net = parallel(world, replicas)
    if mixed == "ours":
        autoamp.convert(net, **{**BF16, **options})
    # Ranks of one tensor-parallel group have the same data.
    batches = [batch(step, rank // (world // replicas)) for step in range(5)]
    adam = torch.optim.Adam(net.parameters(), 1e-2, foreach=False)
    trained = steps(net, adam, batches, autocast=mixed == "autocast")
    skipped = autoamp.report(net).skipped if mixed == "ours" else []
    return trained, [why for _, why in skipped]


def test_tensor_parallel_is_autocasts_to_the_bit(two: Ranks) -> None:
    theirs = two.run(train, 2, "autocast")
    ours = two.run(train, 2, "ours")
    for (trained, why), (expected, _) in zip(ours, theirs, strict=True):
        assert trained.losses == expected.losses
        assert trained.weights == expected.weights
        assert any("computes on DTensors" in each for each in why)


@pytest.mark.slow
def test_fp16_is_bf16_where_nothing_scales(two: Ranks) -> None:
    theirs = two.run(train, 2, "autocast")
    ours = two.run(train, 2, "ours", precision="fp16")
    assert [t.losses for t, _ in ours] == [t.losses for t, _ in theirs]


def losses(results: list[tuple[Trained, list[str]]]) -> Tensor:
    return torch.tensor([trained.losses for trained, _ in results])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options"), [(2, {}), (1, {"backend": "inductor"})]
)
def test_losses_are_as_near_to_fp32s_as_autocasts(
    replicas: int, options: dict[str, str], two: Ranks, four: Ranks
) -> None:
    """With FSDP round the blocks, where the other parts are converted; and compiled."""
    ranks, world = (four, 4) if replicas > 1 else (two, 2)
    plain, autocast = (
        losses(ranks.run(train, world, mixed, replicas=replicas))
        for mixed in ("no", "autocast")
    )
    results = ranks.run(
        train, world, "ours", replicas=replicas, deadline=200, **options
    )
    deviation = float((losses(results) - plain).abs().max())
    assert 0 < deviation <= bound(plain, autocast)
    assert all(trained.weights == results[0][0].weights for trained, _ in results)


def test_strict_refuses_before_training_begins(two: Ranks) -> None:
    with pytest.raises(RankError, match="computes on DTensors") as refused:
        two.run(train, 2, "ours", strict=True)
    assert str(refused.value).count("CaptureError") >= 2
