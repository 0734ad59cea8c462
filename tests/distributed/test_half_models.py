"""Models that arrive in half precision, trained on two ranks without a line of autoamp.

The programs are written as for fp32 weights.  Their norms begin at 1, and are trained
by updates that a half weight near 1 cannot hold.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoamp
from autoamp import compat
from tests.distributed.ranks import Ranks
from tests.training.half_programs import BF16, FP16, FP32, STEPS, Net, adam, batch


def loss_on(model: nn.Module, dtype: torch.dtype, part: int = 0, of: int = 1) -> Tensor:
    """The loss of this rank's rows, or of a part of them."""
    x, y = (t[dist.get_rank() :: dist.get_world_size()] for t in batch(dtype))
    return nn.functional.cross_entropy(model(x[part::of]).float(), y[part::of]) / of


def loop(model: nn.Module, optimizer: Any, dtype: torch.dtype) -> None:
    for _ in range(STEPS):
        loss_on(model, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- programs: each gives its model, and the whole norm weight -------------------------


def ddp_accumulated(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    model = DistributedDataParallel(Net().to(dtype))
    optimizer = adam(model.parameters())
    for _ in range(STEPS):
        with model.no_sync():
            loss_on(model, dtype, 0, 2).backward()
        loss_on(model, dtype, 1, 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, model.module.norm.weight


def _scaled(model: nn.Module, dtype: torch.dtype) -> None:
    """A GradScaler's loop, in which one rank's loss is infinite once."""
    optimizer, scaler = adam(model.parameters()), torch.amp.GradScaler("cpu", 2.0**13)
    for step in range(STEPS):
        loss = loss_on(model, dtype)
        if step == STEPS // 2 and dist.get_rank() == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**12


def ddp_scaled(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    model = DistributedDataParallel(Net().to(dtype))
    _scaled(model, dtype)
    return model, model.module.norm.weight


def fsdp2_scaled(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    model: Any = fully_shard(Net().to(dtype))
    _scaled(model, dtype)
    return model, model.norm.weight.full_tensor()


def fsdp2_accumulated(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    net = Net().to(dtype)
    fully_shard(net.layer)
    model: Any = fully_shard(net)
    optimizer = adam(model.parameters())
    for _ in range(STEPS):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            loss_on(model, dtype, part, 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, model.norm.weight.full_tensor()


def _fsdp1(dtype: torch.dtype, original: bool) -> tuple[nn.Module, Tensor]:
    model = FullyShardedDataParallel(
        Net().to(dtype), use_orig_params=original, device_id=torch.device("cpu")
    )
    loop(model, adam(model.parameters()), dtype)
    return model, model.state_dict()["norm.weight"]


def fsdp1(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    return _fsdp1(dtype, original=True)


def fsdp1_flat(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    return _fsdp1(dtype, original=False)


Program = Callable[[torch.dtype], tuple[nn.Module, Tensor]]


@contextlib.contextmanager
def automatic(on: bool = True) -> Iterator[list[str]]:
    """The automatic mode, and what it says."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autoamp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    if on:
        autoamp.enable(hot=False, do_no_harm=False)
    try:
        yield told
    finally:
        autoamp.disable()
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def trained(
    rank: int, program: Program, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[str], set[torch.dtype]]:
    """Norm weights less 1: those of `dtype` and of fp32; lines said, and dtypes."""
    with automatic() as told:
        model, weight = program(dtype)
        dtypes = {p.dtype for p in model.state_dict().values()}
    with automatic(on=False):
        expected = program(FP32)[1]
    found = weight.detach().float() - 1, expected.detach() - 1
    return *found, [text for text in told if "updates fp32 masters" in text], dtypes


@pytest.mark.parametrize(
    ("program", "dtype"),
    [
        (ddp_accumulated, BF16),
        (ddp_scaled, FP16),
        (fsdp2_scaled, FP16),
        (fsdp2_accumulated, BF16),
        (fsdp1, BF16),
        (fsdp1_flat, BF16),
    ],
    ids=lambda each: getattr(each, "__name__", str(each).removeprefix("torch.")),
)
def test_norms_move_as_in_fp32(
    program: Program, dtype: torch.dtype, two: Ranks
) -> None:
    results = two.run(trained, program, dtype)
    for moved, wanted, said, dtypes in results:
        assert len(said) == 1, "one line"
        assert dtypes == {dtype}
        assert torch.equal(moved, results[0][0]), "ranks have the same weights"
        assert int(moved.count_nonzero()) >= 0.9 * int(wanted.count_nonzero())
        assert (moved - wanted).abs().mean() < 0.006
        assert nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.9


# -- saved and resumed -----------------------------------------------------------------


def go_on(rank: int, folder: str, resumed: bool) -> tuple[list[float], list[float]]:
    """Trains and saves, or loads; then trains on: the masters' sums before and after.

    All ranks have all rows, so that their number changes no mean.
    """
    x, y = batch(BF16)
    with automatic():
        model: Any = fully_shard(Net().to(BF16))
        optimizer = adam(model.parameters())

        def train() -> list[float]:
            for _ in range(STEPS):
                nn.functional.cross_entropy(model(x).float(), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            return sums()

        def sums() -> list[float]:
            masters = optimizer.state_dict()["autoamp_masters"].values()
            return [m.full_tensor().double().sum().item() for m in masters]

        if not resumed:
            train()
        weights, states = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": states}
        if resumed:
            dcp.load(saved, checkpoint_id=folder)
            set_state_dict(
                model, optimizer, model_state_dict=weights, optim_state_dict=states
            )
        else:
            dcp.save(saved, checkpoint_id=folder)
        return sums(), train()


def test_resumed_on_as_many_ranks_and_on_one(
    one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    ((saved, after), _) = two.run(go_on, str(tmp_path), False)
    assert two.run(go_on, str(tmp_path), True)[0] == (saved, after)
    ((loaded, alone),) = one.run(go_on, str(tmp_path), True)
    assert loaded == pytest.approx(saved, rel=1e-7)
    # The sum over other shards of the same numbers rounds otherwise.
    assert alone == pytest.approx(after, rel=1e-3, abs=1e-2)


# -- a bad batch -----------------------------------------------------------------------


def _spoiled(
    rank: int, wrap: str, parts: int
) -> tuple[list[bool], list[bool], list[Tensor]]:
    """Trains; in step 1 the first batch of rank 1 is bad.

    Returns:
        For each step whether it was skipped, and whether buffers and weights changed;
        the weights in the end.
    """
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8)
    net = nn.Sequential(*layers).to(BF16)
    skipped, changed = [], []
    with automatic():
        model = fully_shard(net) if wrap == "fsdp2" else DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def state() -> list[Tensor]:
            weights = [compat.local_part(p.detach()) for p in net.parameters()]
            return [t.clone() for t in (*weights, *net.buffers())]

        for step in range(3):
            # DistributedDataParallel gives each rank the buffers of rank 0.
            if wrap == "ddp":
                for buffer in net.buffers():
                    dist.broadcast(buffer, 0)
            before = state()
            for part in range(parts):
                x = torch.randn(4, 8, dtype=BF16)
                if (step, part, rank) == (1, 0, 1):
                    x = x * torch.nan
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(bool(getattr(optimizer, "step_was_skipped", False)))
            changed.append(not all(map(torch.equal, state(), before)))
        return skipped, changed, [p.detach() for p in map(_whole, net.parameters())]


def _whole(param: Any) -> Tensor:
    return param.full_tensor() if hasattr(param, "full_tensor") else param


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_every_rank_skips_a_bad_batch_and_keeps_its_state(
    wrap: str, parts: int, two: Ranks
) -> None:
    results = two.run(_spoiled, wrap, parts)
    for skipped, changed, weights in results:
        assert skipped == [False, True, False]
        assert changed == [True, False, True]
        assert all(map(torch.equal, weights, results[0][2]))
        assert all(bool(w.isfinite().all()) for w in weights)
