"""Models whose weights are DTensors: rewritten, as near to fp32 as under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import autoamp
from tests.distributed.ranks import Ranks
from tests.distributed.training import WIDE, WIDTH, Block, Net, Trained, batch, steps
from tests.small_models import BF16
from tests.trainers.harness import bound

PLANS: dict[str, dict[str, Any]] = {
    "columns and rows": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequences": {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    },
}
"""How the linears of a block lie on the mesh; "sequences" also shards the rows."""


class Stream(nn.Module):
    """Blocks on an fp32 stream, whose rows the ranks share between the linears."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDE, 4)
        for block in self.blocks:
            parallelize_module(block, mesh, PLANS["sequences"])
        rows = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(0),)}
        first = PrepareModuleInput(**rows, use_local_output=True)
        parallelize_module(self.blocks[0], mesh, first)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, WIDE // WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.last(_gathered(x, self.mesh))


def _gathered(x: Tensor, mesh: Any) -> Tensor:
    whole = DTensor.from_local(x, mesh, (Shard(0),), run_check=False)
    return whole.redistribute(placements=(Replicate(),)).to_local()


def parallel(plan: str, world: int, replicas: int = 1) -> nn.Module:
    """A net with tensor-parallel blocks, sharded over `replicas` by FSDP."""
    shape = (replicas, world // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if plan == "sequences":
        net: Any = Stream(mesh["tp"])
        blocks = net.blocks
    else:
        net = Net()
        blocks = net.blocks
        for block in blocks:
            parallelize_module(block, mesh["tp"], PLANS[plan])
    if replicas > 1:
        for block in blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
    return net


def train(
    rank: int,
    world: int,
    mixed: str,
    plan: str = "columns and rows",
    *,
    replicas: int = 1,
    **options: Any,
) -> tuple[Trained, list[str], float]:
    """Five steps with Adam, what was left out, and the share of low flops."""
    net = parallel(plan, world, replicas)
    if mixed == "ours":
        autoamp.convert(net, **{**BF16, **options})
    # Ranks of one tensor-parallel group have the same data.
    batches = [batch(step, rank // (world // replicas)) for step in range(5)]
    adam = torch.optim.Adam(net.parameters(), 1e-2, foreach=False)
    trained = steps(net, adam, batches, autocast=mixed == "autocast")
    if mixed != "ours":
        return trained, [], 0.0
    report = autoamp.report(net)
    share = report.coverage.low_flops / max(report.coverage.flops, 1)
    return trained, [why for _, why in report.skipped], share


def losses(results: list[Any]) -> Tensor:
    return torch.tensor([trained.losses for trained, *_ in results])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", list(PLANS))
def test_losses_are_as_near_to_fp32s_as_autocasts(
    plan: str, precision: str, two: Ranks
) -> None:
    plain, autocast = (
        losses(two.run(train, 2, mixed, plan)) for mixed in ("no", "autocast")
    )
    results = two.run(train, 2, "ours", plan, precision=precision, strict=True)
    deviation = float((losses(results) - plain).abs().max())
    assert 0 < deviation <= bound(plain, autocast)
    assert all(not why and share == 1 for _, why, share in results)
    assert all(trained.weights == results[0][0].weights for trained, *_ in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options"),
    [(2, {}), (2, {"precision": "fp16"}), (1, {"backend": "inductor"})],
)
def test_with_fsdp_round_the_blocks_and_compiled(
    replicas: int, options: dict[str, str], two: Ranks, four: Ranks
) -> None:
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
    assert all(trained.weights == results[0][0].weights for trained, *_ in results)
