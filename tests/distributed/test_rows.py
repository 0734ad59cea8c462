"""Settings of DDP and FSDP2 in both precisions: the rows of a table of the docs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.distributed.ranks import Ranks
from tests.distributed.test_fsdp import sharded
from tests.distributed.training import Block, Net, Trained, batch, steps
from tests.trainers.harness import bound

STEPS, BAD = 6, 3


class Checkpointed(Block):
    """A block that checkpoints its own forward by `torch.utils.checkpoint`."""

    reentrant = False

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class ByReentry(Checkpointed):
    reentrant = True


def ddp(net: Net, **settings: Any) -> nn.Module:
    return DistributedDataParallel(net, **settings)


def fsdp(
    net: Net,
    *,
    block: type[Block] | None = None,
    wrapped: CheckpointImpl | None = None,
    **settings: Any,
) -> nn.Module:
    """A net that FSDP2 shards block by block, with blocks that are checkpointed."""
    for at in range(len(net.blocks)) if block else ():
        net.blocks[at] = block()
    if wrapped is not None:
        apply_activation_checkpointing(
            net,
            checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, wrapped),
            check_fn=lambda m: isinstance(m, Block),
        )
    return sharded(net=net, **settings)


FP16, BF16 = torch.float16, torch.bfloat16

ROWS: dict[str, tuple[int, Callable[..., nn.Module], dict[str, Any]]] = {
    "gradients are views": (2, ddp, {"gradient_as_bucket_view": True}),
    "static graph": (2, ddp, {"static_graph": True}),
    "hybrid": (4, fsdp, {"replicas": 2}),
    "offloaded": (2, fsdp, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "wrapped": (2, fsdp, {"wrapped": CheckpointImpl.NO_REENTRANT}),
    "wrapped, reentrant": (2, fsdp, {"wrapped": CheckpointImpl.REENTRANT}),
    "checkpointed": (2, fsdp, {"block": Checkpointed}),
    "checkpointed, reentrant": (2, fsdp, {"block": ByReentry}),
    "in bf16": (2, fsdp, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)}),
    "in fp16": (2, fsdp, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=FP16)}),
    "to a number": (4, fsdp, {"reshard_after_forward": 2}),
    "root resharded": (2, fsdp, {"reshard_after_forward": True}),
}
"""How many ranks, what wraps the net, and with which settings."""

row = pytest.mark.row

MARKS = {
    "gradients are views": [row("gradient_as_bucket_view=True")],
    "static graph": [row("static_graph=True")],
    "hybrid": [row("a 2-D mesh (hybrid)")],
    "offloaded": [row("CPUOffloadPolicy")],
    "wrapped": [row("activation checkpointing")],
    "in bf16": [row("MixedPrecisionPolicy(reduce_dtype=...)")],
    "to a number": [row("reshard_after_forward=<a number>")],
    "root resharded": [row("reshard_after_forward=True of the root")],
}
"""The rows of docs/distributed.md that settings stand for."""

QUICK = "gradients are views"

NAMES = [
    pytest.param(
        name,
        marks=[*MARKS.get(name, []), *([] if name == QUICK else [pytest.mark.slow])],
        id=name,
    )
    for name in ROWS
]


def train(
    rank: int,
    name: str,
    mixed: str,
    *,
    after: bool = False,
    bad: int = -1,
    no_sync: bool = False,
) -> tuple[Trained, float]:
    """Some steps in fp32, under autocast, or in a precision; and the share of flops."""
    _, wrap, settings = ROWS[name]
    ours = mixed in ("fp16", "bf16")
    net: nn.Module = Net()
    options: dict[str, Any] = {"precision": mixed, "do_no_harm": False}
    if mixed == "fp16":
        options["loss_scale"] = "dynamic"
    if ours and not after:
        autoamp.convert(net, **options)
    net = wrap(net, **settings)
    if ours and after:
        autoamp.convert(net, **options)

    def region(step: int) -> AbstractContextManager[Any]:
        # In the very first backward torch's static graph takes no `no_sync`.
        return net.no_sync() if step else nullcontext()

    trained = steps(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-2),
        [batch(step, rank) for step in range(STEPS)],
        bad=[bad] if rank == 1 else (),
        autocast=mixed == "autocast",
        accumulate=region if no_sync else None,
    )
    share = autoamp.report(net).coverage.share_of_flops if ours else 0.0
    return trained, share or 0.0


def ranks_of(name: str, request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue({2: "two", 4: "four"}[ROWS[name][0]])


def losses(results: list[tuple[Trained, float]]) -> Tensor:
    return torch.tensor([trained.losses for trained, _ in results])


def check_losses(ranks: Ranks, name: str, precision: str, **more: Any) -> None:
    """Losses are as near to fp32's as autocast's, and all products are low."""
    plain, autocast, ours = (
        ranks.run(train, name, mixed, **more) for mixed in ("no", "autocast", precision)
    )
    assert {share for _, share in ours} == {1.0}
    assert all(trained.weights == ours[0][0].weights for trained, _ in ours)
    deviation = float((losses(ours) - losses(plain)).abs().max())
    assert 0 < deviation <= bound(losses(plain), losses(autocast))


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_as_near_to_fp32s_as_autocasts(
    name: str, precision: str, request: pytest.FixtureRequest
) -> None:
    check_losses(ranks_of(name, request), name, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["gradients are views", "static graph"])
def test_losses_of_accumulated_gradients(name: str, precision: str, two: Ranks) -> None:
    check_losses(two, name, precision, no_sync=True)


@pytest.mark.thorough
@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_skip_the_same_step(
    name: str, after: bool, request: pytest.FixtureRequest
) -> None:
    results = ranks_of(name, request).run(train, name, "fp16", bad=BAD, after=after)
    first = results[0][0]
    for trained, share in results:
        assert share == 1.0
        assert trained.skipped == [step == BAD for step in range(STEPS)]
        assert (trained.scales, trained.weights) == (first.scales, first.weights)
    assert first.weights[BAD] == first.weights[BAD - 1]


def train_near_the_limit(rank: int, precision: str) -> Trained:
    """The gradients of one step are finite on both ranks, and too large for fp16."""
    policy = MixedPrecisionPolicy(reduce_dtype=FP16)
    net = autoamp.convert(nn.Linear(16, 4), precision=precision, do_no_harm=False)
    net = fully_shard(net, mp_policy=policy)
    batches = [batch(step, rank) for step in range(STEPS)]
    batches[BAD][1].fill_(4e6)
    return steps(net, torch.optim.SGD(net.parameters(), 1e-9), batches)


@pytest.mark.thorough(but=["bf16"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_gradient_that_overflows_as_it_is_reduced(precision: str, two: Ranks) -> None:
    first, second = two.run(train_near_the_limit, precision)
    assert first.skipped == second.skipped
    assert first.skipped[BAD]
    assert not any(first.skipped[:BAD])
    assert first.weights == second.weights
    assert first.weights[BAD] == first.weights[BAD - 1]
