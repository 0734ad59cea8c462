"""FSDP2: weights are gathered in the low dtype, and graphs read the same numbers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)

import autoamp
from autoamp import compat
from autoamp.training.sentinels import COPIES
from tests.distributed.ranks import Ranks
from tests.distributed.traffic import counting
from tests.distributed.training import Block, Net, Trained, batch, slow, steps
from tests.small_models import BF16

STEPS = 6

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "root alone": {"blocks": False},
    "kept until the backward": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "checkpointed": {"checkpointed": True},
    "reduced in bf16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
}


def sharded(
    *,
    blocks: bool = True,
    checkpointed: bool = False,
    replicas: int = 1,
    net: nn.Module | None = None,
    **settings: Any,
) -> Net:
    """A net that FSDP2 shards, by default block by block."""
    world = torch.distributed.get_world_size()
    net = net or Net()
    if checkpointed:
        apply_activation_checkpointing(net, check_fn=lambda m: isinstance(m, Block))
    names = ("replicate", "shard")
    shape = (replicas, world // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    settings["mesh"] = mesh if replicas > 1 else mesh["shard"]
    for block in net.blocks if blocks else ():
        fully_shard(block, **settings)
    return fully_shard(net, **settings)


def train(
    rank: int,
    mixed: str = "ours",
    **settings: Any,
) -> Trained:
    """Some steps."""
    net = Net()
    if mixed == "ours":
        autoamp.convert(net, **BF16)
    net = sharded(net=net, **settings)
    trained = steps(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-2),
        [batch(step, rank) for step in range(STEPS)],
    )
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    return trained


# -- traffic ---------------------------------------------------------------------------


def traffic(rank: int, mixed: str, *, low: bool = True, **more: Any) -> Any:
    """The training, and the bytes gathered in its last four steps."""
    with pytest.MonkeyPatch.context() as patch, counting() as sizes:
        if not low:
            patch.setattr(compat, "may_gather_low", lambda *_: False)
        trained = train(rank, mixed, **more)
    return trained, sum(sizes[len(sizes) * 2 // STEPS :])


@pytest.mark.parametrize(
    "setting", slow(["plain", "offloaded", "checkpointed"], "plain")
)
def test_blocks_are_gathered_low_and_read_the_same(setting: str, two: Ranks) -> None:
    """Bit for bit; 0.55 of fp32's bytes are asked for, with the root's in fp32."""
    more = SETTINGS[setting]
    for (low, fewer), (wide, all_of_ours), (_, fp32s) in zip(
        two.run(traffic, "ours", **more),
        two.run(traffic, "ours", low=False, **more),
        two.run(traffic, "no", **more),
        strict=True,
    ):
        assert low.losses == wide.losses
        assert low.weights == wide.weights
        assert all_of_ours == fp32s
        assert fewer <= 0.55 * fp32s


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["root alone", "kept until the backward", "reduced in bf16"]
)
def test_what_others_may_read_is_gathered_in_fp32(setting: str, two: Ranks) -> None:
    """The root's weights stay whole after the forward, where anybody may read them."""
    for (_, ours), (_, fp32s) in zip(
        two.run(traffic, "ours", **SETTINGS[setting]),
        two.run(traffic, "no", **SETTINGS[setting]),
        strict=True,
    ):
        assert (ours < fp32s) == (setting == "reduced in bf16")


def a_policy_of_the_users(rank: int) -> tuple[int, int, set[torch.dtype]]:
    """Bytes gathered with the user's own `param_dtype`, with and without us."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    seen = set()
    found = []
    for mixed in ("ours", "no"):
        with counting() as sizes:
            train(rank, mixed, mp_policy=policy)
        found.append(sum(sizes))
    net = sharded(mp_policy=policy)
    net.first.register_forward_hook(lambda *given: seen.add(given[2].dtype))
    autoamp.convert(net, **BF16)(batch(0, rank)[0])
    return (*found, seen)


@pytest.mark.slow
def test_a_policy_of_the_users_is_honoured(two: Ranks) -> None:
    for ours, theirs, dtypes in two.run(a_policy_of_the_users):
        assert ours == theirs
        assert dtypes == {torch.bfloat16}


# -- whoever else reads a weight -------------------------------------------------------


def after_three_calls(rank: int, **settings: Any) -> Net:
    """A net whose blocks are gathered low."""
    net = autoamp.convert(sharded(**settings), **BF16)
    for step in range(3):
        net(batch(step, rank)[0]).sum().backward()
    net.zero_grad()
    assert any(gathered_low(net))
    return net


def read_outside(rank: int) -> None:
    net = after_three_calls(rank)
    block = net.blocks[0]
    exact = block.up.weight.full_tensor()
    assert not torch.equal(exact, exact.bfloat16().float())
    block.unshard()
    assert torch.equal(block.up.weight, exact)
    block.reshard()
    assert torch.equal(net.state_dict()["blocks.0.up.weight"].full_tensor(), exact)
    # A call and a backward in fp32 read fp32.
    with counting() as sizes, autoamp.disabled():
        net(batch(0, rank)[0]).sum().backward()
    wide = [p.grad.full_tensor() for p in net.parameters()]
    autoamp.revert(net)
    net.zero_grad()
    with counting() as plain:
        net(batch(0, rank)[0]).sum().backward()
    assert sizes == plain
    for one, other in zip(wide, net.parameters(), strict=True):
        assert torch.equal(one, other.grad.full_tensor())


def test_weights_read_outside_of_a_call_are_exact(two: Ranks) -> None:
    two.run(read_outside)


class Penalised(Block):
    """A block that returns a penalty on one of its weights, if it is asked to."""

    asked = False

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        if self.asked:
            result = result + self.up.weight.square().mean() * 0
        return result


def read_later(rank: int) -> tuple[bool, bool, int]:
    """Whether a weight is gathered low before and after a new graph reads it in fp32.

    The last number is how many weights are gathered low in the end.
    """
    net = Net()
    net.blocks[0] = Penalised()
    net = autoamp.convert(sharded(net=net), **BF16)
    found = []
    for step in range(9):
        net.blocks[0].asked = step >= 4
        net(batch(step, rank)[0]).sum().backward()
        if step in (3, 8):
            found.append(gathered_low(net.blocks[0]))
    names = [name for name, _ in net.blocks[0].named_parameters()]
    before, after = (each[names.index("up.weight")] for each in found)
    return before, after, sum(found[1])


def gathered_low(model: nn.Module) -> list[bool]:
    """Whether each sharded parameter is gathered in the low dtype."""
    pairs = compat.sharded_parameters(model)
    return [type(record).__name__ == "LowGathered" for _, record in pairs]


def test_a_weight_that_a_new_graph_reads_is_gathered_in_fp32_again(two: Ranks) -> None:
    for before, after, others in two.run(read_later):
        assert before
        assert not after
        assert others


def graph_on_one_rank(rank: int) -> list[bool]:
    """Rank 1 reads a weight in fp32 as well, and so neither rank gathers it low."""
    net = Net()
    net.blocks[0] = Penalised()
    net.blocks[0].asked = rank == 1
    net = autoamp.convert(sharded(net=net), **BF16)
    for step in range(5):
        net(batch(step, rank)[0]).sum().backward()
    return gathered_low(net)


def test_ranks_gather_alike(two: Ranks) -> None:
    first, second = two.run(graph_on_one_rank)
    assert first == second
    assert any(first)


# -- memory ----------------------------------------------------------------------------


def memory(rank: int, checkpointed: bool) -> None:
    """Between its forward and its backward a block holds no whole weights."""
    copies = {low: set(store) for low, store in COPIES.items()}
    net = after_three_calls(rank, checkpointed=checkpointed)
    loss = net(batch(0, rank)[0]).sum()
    records = [r for _, r in compat.sharded_parameters(net) if hasattr(r, "in_low")]
    assert records
    for record in records:
        assert record.in_low.untyped_storage().size() == 0
        assert record.in_wide.untyped_storage().size() == 0
    loss.backward()
    # None is kept either, not even of the weights that are gathered in fp32.
    assert {low: set(store) for low, store in COPIES.items()} == copies


def freed(rank: int) -> bool:
    """Whether a model and its weights go with the last reference to the model."""
    net = after_three_calls(rank)
    known = [weakref.ref(each) for each in (net, net.blocks[0], net.blocks[0].up)]
    del net
    gc.collect()
    return all(ref() is None for ref in known)


def test_nothing_of_ours_keeps_a_model(two: Ranks) -> None:
    assert two.run(freed) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_copy_outlives_the_weights(checkpointed: bool, two: Ranks) -> None:
    two.run(memory, checkpointed)


def inference_first(rank: int, mixed: str, *modes: Any) -> Trained:
    """Calls without gradients, in which the ranks agree; then a training."""
    net = sharded()
    if mixed == "ours":
        autoamp.convert(net, **BF16)
    for mode in modes:
        with mode():
            net(batch(0, rank)[0])
            net(batch(1, rank)[0])
    sgd = torch.optim.SGD(net.parameters(), 1e-2)
    return steps(net, sgd, [batch(step, rank) for step in range(3)])


@pytest.mark.slow
def test_training_after_inference(two: Ranks) -> None:
    modes = torch.no_grad, torch.inference_mode, torch.inference_mode
    first, second = two.run(inference_first, "ours", *modes)
    assert first.weights == second.weights
    assert len(set(map(tuple, first.weights))) == 3
