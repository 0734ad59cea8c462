"""Ranks that are gone or are not alike: an error on every other rank, never a hang."""

from __future__ import annotations

import os
import signal
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.distributed.ranks import RankError, Ranks
from tests.distributed.test_fsdp import sharded
from tests.distributed.training import (
    WIDE,
    WIDTH,
    Block,
    Net,
    batch,
    impatient,
    steps,
)
from tests.small_models import BF16

FP16: dict[str, Any] = {**BF16, "precision": "fp16", "loss_scale": "dynamic"}
BY_NAME = {"fp16": FP16, "bf16": BF16}


def wrapped(wrap: str, options: dict[str, Any]) -> nn.Module:
    impatient()
    net = autoamp.convert(Net(), **options)
    return DistributedDataParallel(net) if wrap == "ddp" else sharded(net=net)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- a rank that dies ------------------------------------------------------------------


def dies(rank: int, wrap: str, precision: str, stepped: bool, when: str) -> None:
    """Rank 1 dies before or after a backward, in the greeting or after a step."""
    net = wrapped(wrap, BY_NAME[precision])
    sgd = torch.optim.SGD(net.parameters(), 0.01)
    if stepped:
        steps(net, sgd, [batch(0, rank)])
    x, y = batch(1, rank)
    if rank == 1 and when == "before":
        die()
    nn.functional.mse_loss(net(x), y).backward()
    if rank == 1:
        die()
    sgd.step()


def survivors(ranks: Ranks, *args: Any, deadline: float = 60) -> str:
    """What is said by the ranks whose neighbour, rank 1, died."""
    with pytest.raises(RankError, match="rank 1 died") as told:
        ranks.run(*args, deadline=deadline)
    said = str(told.value)
    assert "did not answer" not in said
    for rank in range(ranks.world):
        assert rank == 1 or f"rank {rank} raised" in said
    return said


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.slow
def test_a_rank_that_dies_in_the_greeting(
    wrap: str, precision: str, two: Ranks
) -> None:
    said = survivors(two, dies, wrap, precision, False, "after")
    assert "errors.RankError: rank 1 has not stepped its converted Net" in said
    assert "see whether the rank has died" in said


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.slow
def test_a_rank_that_dies_between_steps(wrap: str, precision: str, two: Ranks) -> None:
    """The wrapper's own collective is the first to find the rank gone."""
    said = survivors(two, dies, wrap, precision, True, "before")
    assert "Connection closed by peer" in said or "Connection reset" in said


@pytest.mark.slow
def test_a_rank_that_dies_before_the_agreement(four: Ranks) -> None:
    # gloo reduces in a ring: a rank that is no neighbour waits for its timeout.
    said = survivors(four, dies, "ddp", "fp16", True, "after", deadline=150)
    assert said.count("errors.RankError: a rank does not take part") == 3
    assert "start all ranks again" in said


class _Store:
    """A store whose server has died."""

    timeout: ClassVar[Any] = torch.distributed.default_pg_timeout

    def set(self, *_: Any) -> None:
        raise torch.distributed.DistNetworkError("broken pipe\nmore")


def without_a_store(rank: int) -> None:
    net = wrapped("ddp", FP16)
    sgd = torch.optim.SGD(net.parameters(), 0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoamp.compat.default_store", _Store)
        with pytest.raises(autoamp.errors.RankError, match="start all ranks") as told:
            steps(net, sgd, [batch(0, rank)])
    assert "broken pipe" in str(told.value)
    assert "more" not in str(told.value)


def test_a_store_that_died_is_named(two: Ranks) -> None:
    two.run(without_a_store)


# -- ranks that are not alike ----------------------------------------------------------


def half_a_pipeline(rank: int, converted: int) -> None:
    """Only one of two stages is converted."""
    impatient()
    first = nn.Sequential(nn.Linear(WIDTH, WIDE), Block())
    last = nn.Sequential(Block(), nn.Linear(WIDE, 4))
    model = (first, last)[rank]
    if rank == converted:
        autoamp.convert(model, **FP16)
    sgd = torch.optim.SGD(model.parameters(), 1e-2)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    for step in range(2):
        x, y = batch(step, 0)
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        sgd.step()
        sgd.zero_grad()


@pytest.mark.slow  # the other stage waits for its own collective to time out
@pytest.mark.parametrize("converted", [0, 1])
def test_a_pipeline_of_which_one_stage_is_converted(converted: int, two: Ranks) -> None:
    other = 1 - converted
    with pytest.raises(RankError, match=f"rank {other} has not stepped") as told:
        two.run(half_a_pipeline, converted, deadline=150)
    said = str(told.value)
    assert "converted a pipeline's stage" in said
    assert f"rank {other} raised" in said  # torch's own error, at its timeout


def on_a_mesh(rank: int, shape: tuple[int, ...], converted: bool) -> str:
    """The error of a mesh that does not fit the world; "" without one."""
    net = Net()
    if converted:
        autoamp.convert(net, **BF16)
    try:
        names = ("replicate", "shard")[-len(shape) :]
        net = fully_shard(
            net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names)
        )
        steps(net, torch.optim.SGD(net.parameters(), 0.01), [batch(0, 0)])
    except Exception as error:  # noqa: BLE001 (whatever a rank is told)
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_a_mesh_larger_than_the_world(shape: tuple[int, ...], two: Ranks) -> None:
    for told in two.run(on_a_mesh, shape, True):
        assert "Mesh should not be bigger than default world size 2" in told


@pytest.mark.slow
def test_a_mesh_that_leaves_a_rank_out_is_as_without_us(two: Ranks) -> None:
    """The rank of the mesh trains alone; torch refuses the rank that is in no mesh."""
    inside, outside = two.run(on_a_mesh, (1,), True)
    assert inside == ""
    assert outside != ""
    assert two.run(on_a_mesh, (1,), False) == [inside, outside]
