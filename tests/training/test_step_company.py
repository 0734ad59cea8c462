"""Several models and optimizers: what they share, and what becomes of them."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import autoamp
from autoamp.training.ledger import KEPT
from tests.says import says
from tests.training.steps import (
    BF16,
    HUGE,
    assert_same,
    converted,
    forget_backwards,
    loss_of,
    mlp,
    moved,
    runs_remembered,
    weights_of,
)


def loss_scale(model: nn.Module) -> Any:
    return autoamp.report(model).loss_scale


pytestmark = pytest.mark.usefixtures("device")


# -- several models --------------------------------------------------------------------


class Gan:
    def __init__(self, set_to_none: bool, frozen: bool) -> None:
        torch.manual_seed(0)
        self.G: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.D: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.g: Any = torch.optim.Adam(self.G.parameters(), 0.01)
        self.d: Any = torch.optim.Adam(self.D.parameters(), 0.01)
        autoamp.convert(self.G, self.g, **BF16)
        autoamp.convert(self.D, self.d, **BF16)
        self.set_to_none, self.frozen = set_to_none, frozen

    def critic(self, factor: float) -> bool:
        self.d.zero_grad(self.set_to_none)
        z, real = torch.randn(6, 8), torch.randn(6, 8)
        loss = self.D(self.G(z).detach()).mean() - self.D(real).mean()
        (loss * factor).backward()
        self.d.step()
        return bool(self.d.step_was_skipped)

    def generator(self, factor: float) -> bool:
        self.g.zero_grad(self.set_to_none)
        self.D.requires_grad_(not self.frozen)
        (self.D(self.G(torch.randn(6, 8))).mean() * factor).backward()
        self.D.requires_grad_(True)
        self.g.step()
        return bool(self.g.step_was_skipped)


# Dynamo's own question, about what the generator hands to the critic.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gan_skips_the_step_that_overflowed(set_to_none: bool, frozen: bool) -> None:
    gan = Gan(set_to_none, frozen)
    for iteration in range(4):
        bad_critic, bad_generator = iteration == 1, iteration == 2
        before = weights_of(gan.G), weights_of(gan.D)
        assert gan.critic(HUGE if bad_critic else 1.0) == bad_critic
        assert_same(weights_of(gan.G), before[0])
        assert moved(before[1], gan.D) != bad_critic
        before = weights_of(gan.G), weights_of(gan.D)
        assert gan.generator(HUGE if bad_generator else 1.0) == bad_generator
        assert_same(weights_of(gan.D), before[1])
        assert moved(before[0], gan.G) != bad_generator
    assert loss_scale(gan.D).scale < 2.0**15


# -- what becomes of an optimizer ------------------------------------------------------


@pytest.mark.parametrize("scheduled", ["no", "before", "after"])
def test_revert_gives_step_back_and_convert_takes_it_again(scheduled: str) -> None:
    model, bystander = mlp(), converted()  # whose hook sees every step
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)

    def schedule() -> None:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)

    if scheduled == "before":
        schedule()
    before = dict(vars(optimizer))
    hooks = {k: dict(v) for k, v in before.items() if k.endswith("_hooks")}
    for round_ in range(2):
        autoamp.convert(model, optimizer, **BF16)
        if scheduled == "after" and not round_:
            schedule()
        for factor in (1.0, HUGE):
            old = weights_of(model)
            loss_of(model, 0, factor).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.step_was_skipped == (factor != 1.0)
            assert moved(old, model) == (factor == 1.0)
        autoamp.revert(model)
        if scheduled != "after":
            assert set(vars(optimizer)) - {"_opt_called"} <= set(before)
            assert vars(optimizer).get("step") is before.get("step")
            assert {k: dict(vars(optimizer)[k]) for k in hooks} == hooks
        old = weights_of(model)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert moved(old, model)
        assert "autoamp" not in optimizer.state_dict()["param_groups"][0]
    assert autoamp.is_converted(bystander)


def test_global_hook_goes_with_the_last_conversion(monkeypatch) -> None:
    # Models of other tests may be alive: this one listens apart from them.
    monkeypatch.setattr("autoamp.training.attach._scalings", weakref.WeakSet())
    monkeypatch.setattr("autoamp.training.attach._hook", [])
    hooks = torch_optimizer._global_optimizer_pre_hooks
    before = dict(hooks)
    models = [converted(), converted()]
    assert len(hooks) == len(before) + 1
    autoamp.revert(models[0])
    assert len(hooks) == len(before) + 1
    autoamp.revert(models[1])
    assert dict(hooks) == before


def test_weights_are_freed_although_runs_are_remembered() -> None:
    model = converted()
    optimizer: Any = torch.optim.Adam(model.parameters())
    for number in range(3):
        loss_of(model, number, HUGE if number == 2 else 1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [weakref.ref(p) for p in model.parameters()]
    gone = weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert [w() for w in weights] == [None] * len(weights)


def test_runs_are_bounded_without_steps_and_no_overflow_is_lost() -> None:
    forget_backwards()  # of other tests' models
    model = converted()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, 0, HUGE).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    for _ in range(100):
        (model(torch.ones(1, 8)).sum() * 1e-3).backward()
        assert runs_remembered() <= KEPT
    before = weights_of(model)
    optimizer.step()
    assert optimizer.step_was_skipped is True
    assert_same(weights_of(model), before)


# -- input that is wrong, and what is reported -----------------------------------------


def test_optimizer_of_another_model() -> None:
    model = mlp()
    with pytest.raises(autoamp.AutoampError):
        autoamp.convert(model, torch.optim.SGD(mlp().parameters(), 0.1), **BF16)
    assert not autoamp.is_converted(model)


def test_report() -> None:
    model = converted()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    for number, factor in enumerate((1.0, HUGE, 1.0)):
        loss_of(model, number, factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = autoamp.report(model)
    said = report.loss_scale
    assert (said.kind, said.scale) == ("DynamicLossScale", 2.0**14)
    assert (said.growth_tracker, said.skipped_steps, said.foreign) == (1, 1, False)
    says(said.skips[0], "step 2", op="linear")
    says(report.full(), "16,384", op="linear")
    assert json.loads(report.to_json())["loss_scale"]["scale"] == 2.0**14
    assert autoamp.report(converted(loss_scale="off")).loss_scale is None
