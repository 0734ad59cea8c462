"""Steps at the edges: what a graph passes on, writes to, and shares with copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.training import attach
from tests.training.steps import BF16, HUGE, mlp, scaling_of

# Dynamo's own, of an input that others computed.
pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]


def finite(module: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in module.parameters())


@pytest.mark.thorough(but=["cpu-True"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_generator_that_is_not_converted_lowers_its_critics_scale(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The critic throws these gradients away, and its own steps never overflow.

    A fused generator's flag lies on a device, as on a GPU.
    """
    if fused:
        monkeypatch.setattr("autoamp.training.step.free_to_read", lambda _: False)
    first, critic = nn.Linear(8, 8), autoamp.convert(mlp(), **BF16)
    # No step changes a weight: at 2**14 gradients are near the largest number, so that
    # for one seed in three a small change made a step overflow that had just not.
    g: Any = torch.optim.Adam(first.parameters(), 0.0, fused=fused)
    d: Any = torch.optim.SGD(critic.parameters(), 0.0)
    scale, x = scaling_of(critic).loss_scale, torch.ones(1, 8)
    skipped = []
    # Times 2**15 this is infinite.  At 2**13 the sums of 4 and 8 products are finite,
    # because weights are below 1 / sqrt(8).
    high = 2.0**113
    for factor in (1.0, 1.0, high, high, high):
        g.zero_grad()
        (critic(first(x)).sum() * factor).backward()
        g.step()
        d.zero_grad()
        critic(x).sum().backward()
        d.step()
        assert not d.step_was_skipped
        skipped.append(bool(g.step_was_skipped))
    assert scale.skipped_steps == sum(skipped)
    assert scale.scale == 2.0 ** (15 - sum(skipped))
    assert skipped[:3] == [False, False, True]
    assert not skipped[-1], "an endless skip"


@pytest.mark.parametrize("frozen", [True, False])
def test_layers_before_a_model_are_kept_from_other_ranks_overflows(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP has reduced another rank's overflow into gradients that were finite here."""
    first = nn.Linear(8, 8)
    critic = autoamp.convert(mlp().requires_grad_(not frozen), **BF16)
    optimizer = torch.optim.SGD(first.parameters(), 0.1)
    others = torch.optim.SGD(critic.parameters(), 0.1)
    monkeypatch.setattr("autoamp.compat.are_several", lambda: True)
    for reduced in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        others.zero_grad()
        critic(first(torch.ones(2, 8))).sum().backward()
        for parameter in first.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(reduced)
        optimizer.step()
        assert optimizer.step_was_skipped == (reduced != 1.0)
    assert finite(first)


def test_an_unrelated_optimizer_steps_after_somebody_elses_overflow() -> None:
    first, other = nn.Linear(8, 8), nn.Linear(8, 1)
    critic = autoamp.convert(mlp().requires_grad_(False), **BF16)
    (critic(first(torch.ones(2, 8))).sum() * HUGE).backward()
    other(torch.ones(2, 8)).sum().backward()
    before = other.weight.clone()
    torch.optim.SGD(other.parameters(), 0.1).step()
    assert not torch.equal(before, other.weight)


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> None:
        x.add_(self.inner(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_model_that_returns_nothing_is_watched_too() -> None:
    model = WritesItsInput()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    autoamp.convert(model, optimizer, **BF16)
    skipped = []
    for factor in (1.0, HUGE, 1.0):
        optimizer.zero_grad()
        x = torch.ones(2, 8) * torch.ones((), requires_grad=True)
        model(x)
        (x.sum() * factor).backward()
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [False, True, False]
    assert finite(model)


def test_reverting_a_copy_leaves_the_original_scaled() -> None:
    model = autoamp.convert(mlp(), **BF16)
    twin = copy.deepcopy(model)
    autoamp.revert(twin)
    assert attach._hook
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (model(torch.ones(2, 8)).sum() * HUGE).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert finite(model)


@pytest.mark.thorough
def test_a_step_the_user_compiles_skips_as_well() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    autoamp.convert(model, optimizer, **BF16)

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    skipped = []
    for factor in (1.0, HUGE, 1.0):
        before = model[0].weight.clone()
        optimizer.zero_grad()
        (model(torch.ones(2, 8)).sum() * factor).backward()
        step()
        skipped.append(optimizer.step_was_skipped)
        assert torch.equal(before, model[0].weight) == (factor != 1.0)
    assert skipped == [False, True, False]
