"""Settings of DDP and FSDP2 in both precisions: the rows of a table of the docs.

Ranks step together or not at all, and as near to fp32 as autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.distributed.ranks import Ranks
from tests.distributed.test_fsdp import sharded
from tests.distributed.training import (
    Block,
    Net,
    Trained,
    batch,
    steps,
    zero_adamw,
)
from tests.scripts import bound

STEPS, BAD = 6, 3


class Checkpointed(Block):
    """A block that checkpoints its own forward by `torch.utils.checkpoint`."""

    reentrant = False

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class ByReentry(Checkpointed):
    reentrant = True


def ddp(net: nn.Module, *, hook: str = "", **settings: Any) -> nn.Module:
    wrapped = DistributedDataParallel(net, **settings)
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


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
    "ddp": (2, ddp, {}),
    "small buckets": (2, ddp, {"bucket_cap_mb": 0.001}),
    "accumulation": (2, ddp, {"no_sync": True}),
    "unused parameters": (2, ddp, {"branch": True, "find_unused_parameters": True}),
    "zero": (2, ddp, {"zero": True}),
    "reduced in fp16": (2, ddp, {"hook": "fp16"}),
    "PowerSGD": (2, ddp, {"hook": "powersgd"}),
    "compiled": (2, ddp, {"backend": "inductor"}),
    "compiled, small buckets": (
        2,
        ddp,
        {"backend": "inductor", "bucket_cap_mb": 0.001},
    ),
    "gradients are views": (2, ddp, {"gradient_as_bucket_view": True}),
    "static graph": (2, ddp, {"static_graph": True}),
    "static graph, accumulation": (2, ddp, {"static_graph": True, "no_sync": True}),
    "fsdp": (2, fsdp, {}),
    "root alone": (2, fsdp, {"blocks": False}),
    "kept until the backward": (2, fsdp, {"reshard_after_forward": False}),
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
    "ddp": [row("DistributedDataParallel")],
    "compiled": [row("with a compiler")],
    "fsdp": [row("FSDP2 (fully_shard)")],
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

LOSSES = ("ddp", "fsdp")
STEPPED = (*LOSSES, "unused parameters", "reduced in fp16")


def cases(names: Iterable[str], quick: tuple[str, ...], *more: Any) -> list[Any]:
    """The rows `names` with `more`, all of them slow but for the `quick` ones."""
    slow = pytest.mark.slow
    return [
        pytest.param(
            name,
            *more,
            marks=[*MARKS.get(name, []), *([] if name in quick else [slow])],
            id="-".join(map(str, (name, *more))),
        )
        for name in names
    ]


def train(
    rank: int, name: str, mixed: str, *, after: bool = False, bad: int = -1
) -> tuple[Trained, float]:
    """Some steps in fp32, under autocast, or in a precision; and the share of flops."""
    _, wrap, given = ROWS[name]
    settings = dict(given)
    branch, zero, no_sync = (
        settings.pop(key, False) for key in ("branch", "zero", "no_sync")
    )
    ours = mixed in ("fp16", "bf16")
    net: nn.Module = Net(branch)
    options = {
        "precision": mixed,
        "do_no_harm": False,
        "backend": settings.pop("backend", "eager"),
    }
    if mixed == "fp16":
        options["loss_scale"] = "dynamic"
    if ours and not after:
        autoamp.convert(net, **options)
    net = wrap(net, **settings)
    if ours and after:
        autoamp.convert(net, **options)
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
    calls = iter(range(STEPS * 2))

    def call(x: Tensor) -> Tensor:
        # In every step the branch is used by one rank, and not by the other.
        return net(x, branch and (next(calls) + rank) % 2 == 0)

    def region(step: int) -> AbstractContextManager[Any]:
        # In the very first backward torch's static graph takes no `no_sync`.
        return net.no_sync() if step else nullcontext()

    trained = steps(
        net,
        zero_adamw(net) if zero else adamw,
        [batch(step, rank) for step in range(STEPS)],
        bad=[bad] if rank == 1 else (),
        autocast=mixed == "autocast",
        accumulate=region if no_sync else None,
        call=call,
    )
    share = autoamp.report(net).coverage.share_of_flops if ours else 0.0
    return trained, share or 0.0


def ranks_of(name: str, request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue({2: "two", 4: "four"}[ROWS[name][0]])


def losses(results: list[tuple[Trained, float]]) -> Tensor:
    return torch.tensor([trained.losses for trained, _ in results])


COMPARED = [name for name in ROWS if not {"hook", "backend"} & ROWS[name][2].keys()]
"""Rows whose own roundings autocast has, too."""


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", cases(COMPARED, LOSSES))
def test_losses_are_as_near_to_fp32s_as_autocasts(
    name: str, precision: str, request: pytest.FixtureRequest
) -> None:
    ranks = ranks_of(name, request)
    plain, autocast, ours = (
        ranks.run(train, name, mixed) for mixed in ("no", "autocast", precision)
    )
    assert {share for _, share in ours} == {1.0}
    assert all(trained.weights == ours[0][0].weights for trained, _ in ours)
    deviation = float((losses(ours) - losses(plain)).abs().max())
    assert 0 < deviation <= bound(losses(plain), losses(autocast))


@pytest.mark.parametrize(
    ("name", "after", "bad"),
    [
        *cases(ROWS, STEPPED, False, BAD),
        *cases(ROWS, ("ddp",), True, BAD),
        *cases(["ddp", "zero", "fsdp", "root alone"], (), False, 0),
    ],
)
def test_ranks_skip_the_same_step(
    name: str, after: bool, bad: int, request: pytest.FixtureRequest
) -> None:
    results = ranks_of(name, request).run(
        train, name, "fp16", bad=bad, after=after, deadline=200
    )
    first = results[0][0]
    for trained, share in results:
        assert share == 1.0
        assert trained.skipped == [step == bad for step in range(STEPS)]
        assert trained.weights == first.weights
    assert not bad or first.weights[bad] == first.weights[bad - 1]
    assert first.weights[bad + 1] != first.weights[bad]


def train_near_the_limit(rank: int, wrap: str, precision: str) -> Trained:
    """The gradients of one step are finite on both ranks, and too large for fp16."""
    net = autoamp.convert(nn.Linear(16, 4), precision=precision, do_no_harm=False)
    if wrap == "fsdp":
        net = fully_shard(net, mp_policy=MixedPrecisionPolicy(reduce_dtype=FP16))
    else:
        net = ddp(net, hook="fp16")
    batches = [batch(step, rank) for step in range(STEPS)]
    batches[BAD][1].fill_(4e6)
    return steps(net, torch.optim.SGD(net.parameters(), 1e-9), batches)


@pytest.mark.parametrize(
    ("wrap", "precision"),
    [
        ("fsdp", "fp16"),
        ("fsdp", "bf16"),
        pytest.param("ddp", "fp16", marks=row("communication hooks")),
    ],
)
def test_a_gradient_that_overflows_as_it_is_reduced(
    wrap: str, precision: str, two: Ranks
) -> None:
    first, second = two.run(train_near_the_limit, wrap, precision)
    assert first.skipped == second.skipped
    assert first.skipped[BAD]
    assert not any(first.skipped[:BAD])
    assert first.weights == second.weights
    assert first.weights[BAD] == first.weights[BAD - 1]
