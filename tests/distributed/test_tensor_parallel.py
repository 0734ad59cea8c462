"""Models that compute on DTensors: rewritten, as near to fp32 as under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import autoamp
from tests.distributed.meshed import PLANS, PROGRAMS, Stream, run
from tests.distributed.ranks import Ranks
from tests.distributed.traffic import wire
from tests.distributed.training import Net, Trained, batch, slow, steps, sums
from tests.scripts import bound
from tests.small_models import BF16


def losses(results: list[Any]) -> Tensor:
    return torch.tensor([each.losses for each in results], dtype=torch.float64)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("program", slow(PROGRAMS, "sequences"))
def test_programs_train_as_near_to_fp32_as_under_autocast(
    program: str, precision: str, two: Ranks
) -> None:
    plain = two.run(run, 2, program, "no")
    autocast = two.run(run, 2, program, "autocast")
    ours = two.run(run, 2, program, "ours", precision=precision, strict=True)
    deviation = float((losses(ours) - losses(plain)).abs().max())
    allowed = bound(losses(plain), losses(autocast))
    print(f"deviation {deviation:.2e}, allowed {allowed:.2e}")
    assert 0 < deviation <= allowed
    assert ours[0].result != plain[0].result
    for each in ours:
        assert not each.left
        assert each.share == 1
        assert each.weights == ours[0].weights


def test_an_overflow_on_one_rank_skips_the_step_on_all(two: Ranks) -> None:
    """A rank's own gradients overflow in its part of a weight; the mesh agrees."""
    bad = {1: 1, 3: 0}
    found = two.run(run, 2, "columns and rows", "ours", precision="fp16", bad=bad)
    for each in found:
        assert each.skipped == [step in bad for step in range(4)]
        assert each.weights == found[0].weights
        assert all(torch.tensor(each.losses).isfinite())


# -- bytes on the wire -----------------------------------------------------------------


def sent(rank: int, mixed: str, **options: Any) -> tuple[float, list[float]]:
    """The bytes of the third step on an fp32 stream, and one number of each weight."""
    region = torch.autocast("cpu", torch.bfloat16, enabled=mixed == "autocast")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net = Stream(mesh["tp"])
    if mixed == "ours":
        autoamp.convert(net, **{**BF16, **options})
    sgd = torch.optim.SGD(net.parameters(), 1e-2, foreach=False)
    for step in range(3):
        x, y = batch(step, 0)
        with wire(2) as found:
            with region:
                loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
        sgd.step()
        sgd.zero_grad()
    return sum(size for _, size in found), [each.item() for each in sums(net)]


def test_casts_go_before_gathers_and_change_no_bit(two: Ranks) -> None:
    plain, _ = two.run(sent, "no")[0]
    theirs, expected = two.run(sent, "autocast")[0]
    ours, weights = two.run(sent, "ours")[0]
    fp32, _ = two.run(sent, "ours", deny=["autoamp::redistribute"])[0]
    low, _ = two.run(sent, "ours", allow=["autoamp::redistribute"])[0]
    assert weights == expected
    # The last gather is read in fp32 on its way out of the mesh.
    assert (plain, theirs, ours, low, fp32) == (4608, 3584, 2560, 2304, 3584)


# -- with other wrappers ---------------------------------------------------------------


def train(
    rank: int, world: int, mixed: str, *, replicas: int = 1, **options: Any
) -> tuple[Trained, float]:
    """Five steps of a net sharded by FSDP too, and the share of low flops."""
    shape = (replicas, world // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    net = Net()
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], PLANS["columns and rows"])
        if replicas > 1:
            fully_shard(block, mesh=mesh["dp"])
    if replicas > 1:
        fully_shard(net, mesh=mesh["dp"])
    if mixed == "ours":
        autoamp.convert(net, **{**BF16, **options})
    # Ranks of one tensor-parallel group have the same data.
    batches = [batch(step, rank // (world // replicas)) for step in range(5)]
    adam = torch.optim.Adam(net.parameters(), 1e-2, foreach=False)
    trained = steps(net, adam, batches, autocast=mixed == "autocast")
    if mixed != "ours":
        return trained, 0.0
    coverage = autoamp.report(net).coverage
    return trained, coverage.low_flops / max(coverage.flops, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (2, {}),
        (2, {"precision": "fp16"}),
        (1, {"backend": "inductor"}),
        (1, {"backend": "inductor", "precision": "fp16"}),
    ],
)
def test_with_fsdp_round_the_blocks_and_compiled(
    replicas: int, options: dict[str, str], two: Ranks, four: Ranks
) -> None:
    ranks, world = (four, 4) if replicas > 1 else (two, 2)

    def trainings(mixed: str, **more: Any) -> list[tuple[Trained, float]]:
        given = {"replicas": replicas, "deadline": 200, **more}
        return ranks.run(train, world, mixed, **given)

    plain, autocast = (
        losses([each for each, _ in trainings(mixed)]) for mixed in ("no", "autocast")
    )
    ours = trainings("ours", **options)
    deviation = float((losses([each for each, _ in ours]) - plain).abs().max())
    assert 0 < deviation <= bound(plain, autocast)
    assert all(share == 1 for _, share in ours)
    assert all(each.weights == ours[0][0].weights for each, _ in ours)
