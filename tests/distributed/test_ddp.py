"""DDP in all its settings: ranks step together or not at all."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.distributed.ranks import Ranks
from tests.distributed.training import (
    WIDTH,
    Net,
    Trained,
    batch,
    steps,
    zero_adamw,
)
from tests.small_models import Quiet

STEPS, BAD = 6, 3
SCALED: dict[str, Any] = {
    "precision": "fp16",
    "loss_scale": "dynamic",
    "do_no_harm": False,
}


def agreed(results: list[Trained]) -> Trained:
    """What the ranks agree on, which they do in every step."""
    first, *others = results
    for other in others:
        assert other.weights == first.weights
        assert other.skipped == first.skipped
    return first


# -- a rank that did nothing which the others could wait for ---------------------------


UNITS = {torch.bfloat16: "amx_bf16"}
"""A CPU on which bf16 pays, whatever CPU the tests run on."""


def train_without_a_graph(rank: int, why: str) -> tuple[Trained, float]:
    """Rank 1 runs no scaled graph; rank 0's gradients overflow in one step."""
    by_price = why == "price"
    units = patch("autoamp.compat.cpu_low_precision_units", lambda: UNITS)
    with units if by_price else nullcontext():
        return train_by(rank, by_price=by_price)


def train_by(rank: int, *, by_price: bool) -> tuple[Trained, float]:
    options = {**SCALED, "do_no_harm": by_price, "precision": "bf16"}
    ddp = DistributedDataParallel(autoamp.convert(Net(), **options))

    def call(x: Tensor) -> Tensor:
        if rank == 0 or by_price:
            return ddp(x)
        with Quiet():
            return ddp(x)

    rows = 4096 if by_price and rank == 0 else 2
    trained = steps(
        ddp,
        torch.optim.SGD(ddp.parameters(), 0.01, momentum=0.9),
        [batch(step, rank, rows) for step in range(STEPS)],
        bad=[BAD] if rank == 0 else (),
        factor=math.inf,
        call=call,
    )
    return trained, autoamp.report(ddp).coverage.share_of_flops or 0.0


@pytest.mark.parametrize("why", ["a mode", "price"])
def test_a_rank_without_graphs_takes_part(why: str, two: Ranks) -> None:
    (first, covered), (second, not_covered) = two.run(train_without_a_graph, why)
    assert covered > 0.9
    assert not_covered == 0
    assert first.weights == second.weights
    for each in first, second:
        assert each.skipped == [step == BAD for step in range(STEPS)]


def train_uneven(rank: int, zero: bool) -> tuple[Trained, Trained]:
    """Rank 1 runs out of inputs after four steps; then both take three more."""
    ddp = DistributedDataParallel(autoamp.convert(Net(), **SCALED))
    # SGD has no state: that of a rank that waits would fall behind.
    sgd = torch.optim.SGD(ddp.parameters(), 0.05)
    optimizer: Any = zero_adamw(ddp) if zero else sgd
    count = STEPS if rank == 0 else STEPS - 2
    with Join([ddp, optimizer]) if zero else ddp.join():
        uneven = steps(
            ddp,
            optimizer,
            [batch(step, rank) for step in range(count)],
            bad=[BAD] if rank == 1 else (),
        )
    even = steps(ddp, optimizer, [batch(step, rank) for step in range(7, 10)])
    return uneven, even


@pytest.mark.row("join(), uneven inputs")
@pytest.mark.parametrize("zero", [False, True])
def test_uneven_inputs(zero: bool, two: Ranks) -> None:
    (longer, even), (shorter, other) = two.run(train_uneven, zero)
    assert longer.skipped == [step == BAD for step in range(STEPS)]
    assert shorter.skipped == longer.skipped[: STEPS - 2]
    assert shorter.weights == longer.weights[: STEPS - 2]
    agreed([even, other])


def train_one_weight(rank: int) -> Trained:
    """ZeroRedundancyOptimizer gives the only weight to one rank, the other has none."""
    layer = nn.Linear(WIDTH, 4, bias=False)
    ddp = DistributedDataParallel(autoamp.convert(layer, **SCALED))
    optimizer = zero_adamw(ddp)
    batches = [batch(step, rank) for step in range(STEPS)]
    return steps(ddp, optimizer, batches, bad=[BAD] if rank == 1 else ())


@pytest.mark.row("ZeroRedundancyOptimizer")
def test_a_rank_whose_optimizer_holds_no_weight_takes_part(two: Ranks) -> None:
    trained = agreed(two.run(train_one_weight))
    assert trained.weights[BAD] == trained.weights[BAD - 1]
    assert trained.weights[BAD + 1] != trained.weights[BAD]


# -- gradients that one rank alone could see -------------------------------------------


def train_clipped(rank: int, after: bool) -> Trained:
    """Rank 1's NaNs are cleared away in hooks, after which DDP reduces gradients."""
    net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    for parameter in net.parameters():
        parameter.register_hook(lambda g: g.nan_to_num(1.0, 1.0, 1.0).clamp(-1, 1))
    options = {**SCALED, "precision": "bf16"}
    ddp = DistributedDataParallel(net if after else autoamp.convert(net, **options))
    if after:
        autoamp.convert(ddp, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    batches = [batch(step, rank) for step in range(STEPS)]
    if rank == 1:
        batches[BAD][1].fill_(math.inf)
    return steps(ddp, optimizer, batches)


@pytest.mark.parametrize("after", [False, True])
def test_a_gradient_mended_before_it_is_reduced(after: bool, two: Ranks) -> None:
    """The step is taken, since every gradient that it reads is finite."""
    trained = agreed(two.run(train_clipped, after))
    assert not any(trained.skipped)
    assert all(math.isfinite(w) for step in trained.weights for w in step)


def train_with_other_sizes(rank: int) -> Trained:
    """Those of rank 0 are small: they leave room for a higher scale."""
    ddp = DistributedDataParallel(autoamp.convert(Net(), **SCALED))
    batches = [batch(step, rank) for step in range(STEPS)]
    for _, y in batches:
        y.mul_(1 if rank else 1e-5)
    with torch.no_grad():
        for p in ddp.module.last.parameters():
            p.zero_()
    return steps(ddp, torch.optim.SGD(ddp.parameters(), 1e-9), batches)


def test_each_rank_climbs_by_its_own_gradients(two: Ranks) -> None:
    results = two.run(train_with_other_sizes)
    trained = agreed(results)
    assert not any(trained.skipped)
    small, large = (each.scales for each in results)
    assert small[-1] > large[-1]


# -- communication while gradients are still computed ----------------------------------


def events(rank: int, backend: str) -> list[str]:
    """The order of a backward's events: gradients of weights, reductions of buckets."""
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    autoamp.convert(net, backend=backend, **{**SCALED, "precision": "bf16"})
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.02)
    seen: list[str] = []

    def reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(f"reduced {bucket.buffer().dtype}")
        return default_hooks.allreduce_hook(None, bucket)

    reduce.__annotations__.clear()  # DDP takes types, not the names of types
    ddp.register_comm_hook(None, reduce)
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda _, name=name: seen.append(name))
    for _step in range(3):  # buckets are made anew in the second step
        seen.clear()
        ddp(torch.randn(8, 64)).sum().backward()
    return seen


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_the_first_bucket_is_reduced_before_the_last_gradient(
    backend: str, two: Ranks
) -> None:
    """An autograd node with all weights as its inputs would give all gradients last."""
    for seen in two.run(events, backend, deadline=200):
        reductions = [i for i, event in enumerate(seen) if event.startswith("reduced")]
        gradients = [i for i, event in enumerate(seen) if event[0].isdigit()]
        assert len(gradients) == 12
        assert len(reductions) >= 3
        assert reductions[0] < gradients[6]
        assert {seen[i] for i in reductions} == {"reduced torch.float32"}
