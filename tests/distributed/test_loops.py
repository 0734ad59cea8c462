"""Loops that decide about steps themselves: weights stay equal on all ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.distributed.ranks import Ranks
from tests.distributed.test_fsdp import sharded
from tests.distributed.training import Net, batch, sums, was_skipped
from tests.quick import each_pair

STEPS, BAD = 8, (2, 3, 6)
"""All steps, and those in which the gradients of one rank overflow."""

Ran = tuple[list[bool], list[float], bool]
"""For each step whether no weight was written; a number of each weight in the end; and
whether all weights are finite."""


class WithLoss(nn.Module):
    """A net that gives its own loss, which some of its calls make too large for fp16.

    Such a loss is one number: no limit on the gradients that enter lowers its scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(x), y) * factor


def _is_bad(step: int, rank: int) -> bool:
    return step in BAD and rank == step % 2


def wrapped(wrap: str, precision: str, net: nn.Module) -> Any:
    return placed(wrap, autoamp.convert(net, precision=precision, do_no_harm=False))


def placed(wrap: str, net: Any) -> Any:
    if wrap == "ddp":
        return DistributedDataParallel(net)
    inner = net.net if isinstance(net, WithLoss) else net
    assert isinstance(inner, Net)
    return sharded(net=inner) and net


def loss_of(net: Any, step: int, rank: int, part: slice = slice(None)) -> Tensor:
    x, y = (each[part] for each in batch(step, rank))
    factor = math.inf if _is_bad(step, rank) else 1.0
    if isinstance(getattr(net, "module", net), WithLoss):
        return net(x, y, torch.tensor(factor))
    return nn.functional.mse_loss(net(x), y) * factor


# -- the loops: each takes one step ----------------------------------------------------


def skips_by_norm(net: Any, optimizer: Any, step: int, rank: int) -> None:
    """The script looks at the norm of all gradients, and takes no step by NaN."""
    loss_of(net, step, rank).backward()
    norm: Any = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if torch.isfinite(norm):
        optimizer.step()


def skips_by_gradient(net: Any, optimizer: Any, step: int, rank: int) -> None:
    """The script agrees by a collective of its own."""
    loss_of(net, step, rank).backward()
    grads: list[Any] = [p.grad for p in net.parameters()]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
    bad = torch.tensor([float(not all(bool(g.isfinite().all()) for g in local))])
    torch.distributed.all_reduce(bad)
    if not bad:
        optimizer.step()


def clips_by_value(net: Any, optimizer: Any, step: int, rank: int) -> None:
    loss_of(net, step, rank).backward()
    nn.utils.clip_grad_value_(net.parameters(), 1.0)
    optimizer.step()


def accumulates(net: Any, optimizer: Any, step: int, rank: int) -> None:
    """The overflow is in each part of a batch, and only the last part is reduced."""
    for number, part in enumerate((slice(0, 4), slice(4, 8))):
        with net.no_sync() if not number else nullcontext():
            loss_of(net, step, rank, part).backward()
    optimizer.step()


def accumulates_over_two(net: Any, optimizer: Any, step: int, rank: int) -> None:
    """A batch whose gradients overflow is followed by one whose gradients do not."""
    with net.no_sync():
        loss_of(net, step, rank).backward()
    loss_of(net, step + STEPS, rank).backward()
    optimizer.step()


def probes(net: Any, optimizer: Any, step: int, rank: int) -> None:
    """One rank alone asks for gradients of its inputs, too large ones as well."""
    loss = loss_of(net, step, rank)
    if rank == 1:
        x = batch(step, rank)[0].requires_grad_()
        for size in (1.0, 1e30, math.inf):
            torch.autograd.grad(net.module(x).sum() * size, x)
    loss.backward()
    if rank == 0:
        x = batch(step, rank)[0].requires_grad_()
        torch.autograd.grad(net.module(x).sum() * math.inf, x)
    optimizer.step()


def probes_together(net: Any, optimizer: Any, step: int, rank: int) -> None:
    """All ranks ask, since a forward gathers weights; one gets infinite gradients."""
    x = batch(step, rank)[0].requires_grad_()
    torch.autograd.grad(net(x).sum() * (math.inf if rank else 1.0), x)
    loss_of(net, step, rank).backward()
    optimizer.step()


Loop = Callable[[Any, Any, int, int], None]

LOOPS: dict[str, tuple[Loop, ...]] = {
    "ddp": (
        skips_by_norm,
        skips_by_gradient,
        clips_by_value,
        accumulates,
        accumulates_over_two,
        probes,
    ),
    "fsdp": (skips_by_norm, skips_by_gradient, clips_by_value, probes_together),
}


def run(rank: int, wrap: str, precision: str, *, own_loss: bool) -> dict[str, Ran]:
    """What each loop does with a copy of one net; the copies share their graphs."""
    torch.manual_seed(0)
    base = WithLoss() if own_loss else Net()
    autoamp.convert(base, precision=precision, do_no_harm=False)
    loops = {each.__name__: each for each in LOOPS[wrap]}
    return {
        name: trained(rank, take, placed(wrap, copy.deepcopy(base)))
        for name, take in loops.items()
        if not (own_loss and "probe" in name)
    }


def trained(rank: int, take: Loop, net: Any) -> Ran:
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    kept, before = [], [*_numbers(net)]
    for step in range(STEPS):
        take(net, optimizer, step, rank)
        optimizer.zero_grad()
        after = [*_numbers(net)]
        kept.append(after == before)
        before = after
    return kept, before, all(map(math.isfinite, before))


def _numbers(net: nn.Module) -> Iterator[float]:
    return (each.item() for each in sums(net))


@pytest.mark.parametrize(
    ("wrap", "precision", "own_loss"), each_pair(LOOPS, ["fp16", "bf16"], [False, True])
)
def test_ranks_go_on_together(
    wrap: str, precision: str, own_loss: bool, two: Ranks
) -> None:
    """The loops of one case run on one capture: each has a net and state of its own.

    CI has each wrapper in each precision, and with each loss in one of them.
    """
    results = two.run(run, wrap, precision, own_loss=own_loss, deadline=200)
    assert results[0].keys() == results[1].keys()
    for loop, (_, expected, _) in results[0].items():
        for each in results:
            kept, weights, finite = each[loop]
            assert kept == [step in BAD for step in range(STEPS)], loop
            assert weights == expected, loop
            assert finite, loop


# -- a scale that is too high on one rank ----------------------------------------------


def too_high(rank: int) -> tuple[list[bool], list[float], float]:
    """A model's own loss overflows at its first scales, on one rank alone."""
    ddp = wrapped("ddp", "fp16", WithLoss())
    sgd = torch.optim.SGD(ddp.parameters(), 1e-6)
    skipped = []
    for step in range(STEPS):
        ddp(*batch(step, rank), torch.tensor(100.0 if rank else 1.0)).backward()
        nn.utils.clip_grad_value_(ddp.parameters(), 1.0)
        sgd.step()
        sgd.zero_grad()
        skipped.append(was_skipped(sgd))
    found = autoamp.report(ddp).loss_scale
    assert found is not None
    return skipped, [*_numbers(ddp)], found.scale


def test_each_rank_finds_a_scale_of_its_own(two: Ranks) -> None:
    (first, weights, high), (second, others, low) = two.run(too_high)
    assert first == second
    assert first[0]
    assert not first[-1]
    assert weights == others
    assert all(map(math.isfinite, weights))
    assert low < high


# -- gradients that DistributedDataParallel does not reduce ----------------------------


def leaves_out(rank: int, how: str, precision: str) -> tuple[list[bool], list[float]]:
    """A weight that is no part of the reduction is given NaN on one rank alone."""
    net = autoamp.convert(Net(), precision=precision, do_no_harm=False)
    own = nn.Parameter(torch.zeros(4))
    if how == "ignored":
        names = ["last.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
        own = net.last.bias
    ddp = DistributedDataParallel(net)
    adam = torch.optim.Adam([{"params": ddp.parameters()}], 1e-2)
    if how == "outside":
        adam.add_param_group({"params": [own]})
    skipped = []
    for step in range(STEPS):
        x, y = batch(step, rank)
        loss = nn.functional.mse_loss(ddp(x) + (own if how == "outside" else 0), y)
        loss.backward()
        assert own.grad is not None
        if _is_bad(step, rank):
            own.grad.fill_(math.nan)
        adam.step()
        adam.zero_grad()
        skipped.append(was_skipped(adam))
    reduced = [p for p in ddp.parameters() if p is not own]
    return skipped, [p.double().sum().item() for p in reduced]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("how", ["ignored", "outside"])
def test_a_gradient_that_is_not_reduced(how: str, precision: str, two: Ranks) -> None:
    (first, weights), (second, others) = two.run(leaves_out, how, precision)
    assert first == second == [step in BAD for step in range(STEPS)]
    assert weights == others
    assert all(map(math.isfinite, weights))
