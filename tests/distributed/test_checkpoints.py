"""A training that goes on from a distributed checkpoint, on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.distributed.ranks import Ranks
from tests.distributed.test_fsdp import sharded
from tests.distributed.training import Net, batch, slow, steps

OPTIONS: dict[str, Any] = {"precision": "fp16", "do_no_harm": False}
BEFORE, AFTER = 4, 3
BAD = 2
"""A step of the first part that is skipped, so that its counters are saved, too."""


def made(wrap: str, named: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A converted model, its optimizer and loss scale.

    Args:
        named: whether `convert` is told of the optimizer.
    """
    net: nn.Module = Net()
    if wrap == "fsdp":
        net = sharded()
    elif wrap == "ddp":
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scale = autoamp.DynamicLossScale()
    autoamp.convert(net, optimizer if named else None, loss_scale=scale, **OPTIONS)
    return net, optimizer, scale


def same_data(first: int, count: int) -> list[Any]:
    """Every rank has the same batches, so that their number changes no mean."""
    return [batch(step, 0) for step in range(first, first + count)]


def save(rank: int, wrap: str, folder: str) -> Any:
    """Trains, saves, goes on; what it has in the end."""
    net, optimizer, scale = made(wrap, named=False)
    steps(net, optimizer, same_data(0, BEFORE), bad=[BAD])
    model, states = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=folder)
    saved = scale.state_dict()
    trained = steps(net, optimizer, same_data(BEFORE, AFTER))
    return saved, trained.losses, trained.weights, scale.state_dict()


def resume(rank: int, wrap: str, folder: str, named: bool) -> Any:
    """Loads and goes on; what it has in the end."""
    net, optimizer, scale = made(wrap, named)
    model, states = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)
    trained = steps(net, optimizer, same_data(BEFORE, AFTER))
    return trained.losses, trained.weights, scale.state_dict()


@pytest.mark.parametrize("named", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("wrap", slow(["ddp", "fsdp"], "fsdp"))
def test_a_training_goes_on_bit_for_bit(
    wrap: str, named: bool, two: Ranks, tmp_path: Path
) -> None:
    results = two.run(save, wrap, str(tmp_path))
    for saved, *expected in results:
        assert saved["skipped_steps"] == 1
        assert saved["scale"] != 2.0**15
        assert two.run(resume, wrap, str(tmp_path), named)[0] == tuple(expected)


@pytest.mark.row("another number of ranks after a restart")
@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_onto_another_number_of_ranks(
    wrap: str, one: Ranks, two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    ((saved, losses, _, after), _) = two.run(save, wrap, str(tmp_path))
    for ranks in four, one:
        for others, _, theirs in ranks.run(resume, wrap, str(tmp_path), True):
            # The sum over other shards of the same numbers rounds otherwise.
            assert others[0] == losses[0]
            assert others == pytest.approx(losses, rel=1e-5)
            assert theirs["skipped_steps"] == after["skipped_steps"]
            assert theirs["scale"] == after["scale"]
    assert saved["skipped_steps"] == 1


# -- a model in half precision ---------------------------------------------------------


def half(rank: int, wrap: str, folder: str, resumed: bool) -> Any:
    """Trains a bf16 model and saves it, or loads it; its masters and those rounded."""
    net: Any = Net().bfloat16()
    net = sharded(net=net) if wrap == "fsdp" else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    autoamp.convert(net, optimizer)
    batches = [[t.bfloat16() for t in pair] for pair in same_data(0, BEFORE)]
    if not resumed:
        steps(net, optimizer, batches)
    model, states = get_state_dict(net, optimizer)
    saved = {"model": model, "optimizer": states}
    if resumed:
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)
    else:
        dcp.save(saved, checkpoint_id=folder)
    masters = optimizer.state_dict()["autoamp_masters"].values()
    whole = [m.full_tensor() if hasattr(m, "full_tensor") else m for m in masters]
    exact = [m.double().sum().item() for m in whole]
    rounded = [m.bfloat16().double().sum().item() for m in whole]
    moments = [s["exp_avg"].dtype for s in optimizer.state.values()]
    return exact, rounded, set(moments)


@pytest.mark.parametrize("wrap", slow(["ddp", "fsdp"], "ddp"))
def test_masters_are_saved_and_loaded(wrap: str, two: Ranks, tmp_path: Path) -> None:
    saved, loaded = (
        two.run(half, wrap, str(tmp_path), resumed) for resumed in (False, True)
    )
    for (exact, rounded, _), (found, _, moments) in zip(saved, loaded, strict=True):
        assert exact != rounded
        assert found == exact
        assert moments == {torch.float32}


@pytest.mark.slow
def test_masters_onto_one_rank(one: Ranks, two: Ranks, tmp_path: Path) -> None:
    ((exact, *_), _) = two.run(half, "fsdp", str(tmp_path), False)
    ((found, *_),) = one.run(half, "fsdp", str(tmp_path), True)
    assert found == exact
