"""Ranks that disagree: told in time, and never left waiting for each other."""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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
    Trained,
    batch,
    impatient,
    steps,
    sums,
    was_skipped,
)
from tests.small_models import BF16

FP16: dict[str, Any] = {
    "precision": "fp16",
    "loss_scale": "dynamic",
    "do_no_harm": False,
}
SCALED_BF16: dict[str, Any] = {**BF16, "loss_scale": "dynamic"}


# -- ranks that are not alike ----------------------------------------------------------


def train(rank: int, converted: list[dict[str, Any] | None], wrap: str) -> Trained:
    """Trains a model that each rank converts with options of its own, or not at all."""
    impatient()
    net: nn.Module = Net()
    options = converted[rank]
    if options is not None:
        autoamp.convert(net, **options)
    net = DistributedDataParallel(net) if wrap == "ddp" else sharded(net=net)
    sgd = torch.optim.SGD(net.parameters(), 0.01)
    return steps(net, sgd, [batch(step, rank) for step in range(3)])


KINDS = "DynamicLossScale on rank"
PRECISIONS = "fp16 on rank 0; bf16 on rank 1"


@pytest.mark.parametrize(
    ("wrap", "options", "match"),
    [
        ("ddp", (FP16, BF16), KINDS),
        ("ddp", (FP16, SCALED_BF16), PRECISIONS),
        pytest.param("ddp", (BF16, FP16), KINDS, marks=pytest.mark.slow),
        pytest.param("fsdp", (FP16, BF16), KINDS, marks=pytest.mark.slow),
        pytest.param("fsdp", (FP16, SCALED_BF16), PRECISIONS, marks=pytest.mark.slow),
    ],
)
def test_other_options_are_an_error_on_every_rank(
    options: tuple[Any, Any], wrap: str, match: str, two: Ranks
) -> None:
    with pytest.raises(RankError, match=match) as told:
        two.run(train, list(options), wrap)
    said = str(told.value)
    assert said.count("errors.RankError: the ranks have converted") == 2
    assert "with the same options, on every rank" in said


@pytest.mark.slow  # the other rank waits for its own collective to time out
@pytest.mark.parametrize("options", [(FP16, None), (None, BF16)])
def test_a_rank_that_has_not_converted_its_model(
    options: tuple[Any, Any], two: Ranks
) -> None:
    """The rank that has raises; the other rank's next collective finds it gone."""
    who, missing = (0, 1) if options[0] else (1, 0)
    with pytest.raises(RankError, match=f"rank {missing} has not stepped") as told:
        two.run(train, list(options), "ddp")
    assert f"rank {who} raised" in str(told.value)


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def other_graphs(rank: int) -> list[str]:
    """Rank 1 has a block more, without weights that are trained."""
    heard = _Heard()
    logging.getLogger("autoamp").addHandler(heard)
    net: nn.Module = Net()
    if rank == 1:
        net.last.register_forward_hook(lambda *given: given[2].sigmoid())
    net = DistributedDataParallel(autoamp.convert(net, **BF16))
    sgd = torch.optim.SGD(net.parameters(), 0.01)
    steps(net, sgd, [batch(step, rank) for step in range(3)])
    logging.getLogger("autoamp").removeHandler(heard)
    return [text for text in heard.said if "other graphs" in text]


def test_other_graphs_are_a_warning_of_one_rank(two: Ranks) -> None:
    first, second = two.run(other_graphs)
    assert second == []
    (said,) = first
    assert "on rank 0" in said
    assert "on rank 1" in said


# -- steps that all take or skip -------------------------------------------------------


def pipeline(rank: int, bad: int) -> Trained:
    """Two stages; the loss of one step overflows, on the rank of the last stage."""
    first = nn.Sequential(nn.Linear(WIDTH, WIDE), Block())
    last = nn.Sequential(Block(), nn.Linear(WIDE, 4))
    model = autoamp.convert((first, last)[rank], **FP16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    trained = Trained()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        factor = math.inf if len(trained.skipped) == bad else 1
        return nn.functional.mse_loss(output, target) * factor

    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=loss)
    for step in range(8):
        x, y = batch(step, 0)
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        optimizer.step()
        optimizer.zero_grad()
        trained.skipped.append(was_skipped(optimizer))
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        trained.losses.append(float(finite))
    return trained


@pytest.mark.row("pipelines (torch.distributed.pipelining)")
@pytest.mark.parametrize("bad", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_stages_of_a_pipeline_step_together(bad: int, two: Ranks) -> None:
    first, last = two.run(pipeline, bad)
    assert first.skipped == last.skipped
    assert first.skipped[bad]
    assert not all(first.skipped)
    assert first.losses == [1.0] * 8


def many(rank: int, count: int, wrap: str) -> tuple[list[bool], list[float], int]:
    """Random overflows, on random ranks, at random sizes of the loss.

    Returns:
        For each step whether it was skipped, a number of each weight in the end, and
        how many overflows were planted on this rank.
    """
    scale = autoamp.DynamicLossScale(growth_interval=1, climbs=True)
    net: nn.Module = autoamp.convert(Net(), **{**FP16, "loss_scale": scale})
    net = DistributedDataParallel(net) if wrap == "ddp" else sharded(net=net)
    sgd = torch.optim.SGD(net.parameters(), 1e-3)
    own, x_and_y = random.Random(rank), [batch(step, rank) for step in range(16)]
    often = 0.4 / torch.distributed.get_world_size()
    skipped, planted = [], 0
    for step in range(count):
        x, y = x_and_y[step % 16]
        size = own.choice([1e-3, 1.0, 30.0])
        bad = own.random() < often
        planted += bad
        loss = nn.functional.mse_loss(net(x), y) * (math.inf if bad else size)
        loss.backward()
        # Neither way of clipping may hide an overflow, from its own rank or another.
        if step % 2:
            nn.utils.clip_grad_value_(net.parameters(), 1.0)
        else:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        sgd.step()
        sgd.zero_grad()
        skipped.append(was_skipped(sgd))
    return skipped, [each.item() for each in sums(net)], planted


@pytest.mark.parametrize(
    ("world", "wrap", "count"),
    [
        ("two", "ddp", 100),
        pytest.param("two", "ddp", 3000, marks=pytest.mark.slow),
        pytest.param("two", "fsdp", 1000, marks=pytest.mark.slow),
        pytest.param("four", "ddp", 3000, marks=pytest.mark.slow),
        pytest.param("four", "fsdp", 1000, marks=pytest.mark.slow),
    ],
)
def test_ranks_skip_the_same_steps_at_scales_of_their_own(
    world: str, wrap: str, count: int, request: pytest.FixtureRequest
) -> None:
    """Of 3000 steps about a thousand are skipped."""
    results = request.getfixturevalue(world).run(many, count, wrap, deadline=250)
    first, weights, _ = results[0]
    for skipped, others, planted in results:
        assert skipped == first
        assert others == weights
        assert planted
    assert all(map(math.isfinite, weights))
    assert sum(first) >= max(planted for *_, planted in results)
    assert count // 4 < sum(first) < count // 2
