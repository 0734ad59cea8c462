"""Steps that are given a closure, by torch's optimizers and by those of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import autoamp
from tests.says import says
from tests.training.steps import (
    HUGE,
    assert_same,
    fresh_copy,
    loss_of,
    name,
    state_of,
    weights_of,
)

pytestmark = [pytest.mark.one_model, pytest.mark.usefixtures("device")]


# -- closures --------------------------------------------------------------------------


def test_step_returns_what_it_returned(base: nn.Module) -> None:
    class Telling(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return "stepped"

    model = fresh_copy(base)
    optimizer: Any = name(Telling(model.parameters(), 0.1), model)
    loss_of(model, 0).backward()
    assert optimizer.step() == "stepped"
    loss_of(model, 0, HUGE).backward()
    assert optimizer.step() is None


# -- optimizers that evaluate when they like -------------------------------------------


class SAM(Optimizer):
    """Sharpness-aware minimization, as people copy it: reads the gradients there are,
    moves the weights, evaluates, moves them back and steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05, "lr": 0.05})
        self.base = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        weights = [p for g in self.param_groups for p in g["params"]]
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        with torch.no_grad():
            for p in weights:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad, alpha=0.05 / (float(norm) + 1e-12))
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for p in weights:
            p.data = self.state[p]["old"]
        self.base.step()
        return loss


def evaluation(model: nn.Module, number: int, factor: float) -> Callable[[], Any]:
    def closure() -> Any:
        loss = loss_of(model, number, factor)
        loss.backward()
        return loss

    return closure


def train_sam(
    model: nn.Module, optimizer: Any, bads: set[tuple[int, int]]
) -> list[Any]:
    records = []
    for number in range(5):
        for planted in (True, False):
            bad = [planted and (number, half) in bads for half in (0, 1)]
            if planted and not any(bad):
                continue
            factors = [HUGE if b else 1.0 for b in bad]
            optimizer.zero_grad()
            loss_of(model, number, factors[0]).backward()

            before = weights_of(model), state_of(optimizer)
            optimizer.step(evaluation(model, number, factors[1]))
            assert optimizer.step_was_skipped == any(bad)
            if any(bad):
                assert_same((weights_of(model), state_of(optimizer)), before)
        records.append((weights_of(model), state_of(optimizer.base)))
    return records


@pytest.mark.parametrize("named", [True, False])
def test_sam(base: nn.Module, named: bool) -> None:
    """Two gradients a step, at different weights; an overflow in either."""
    results = []
    for bads in (set(), {(0, 1), (2, 0), (3, 1)}):
        model = fresh_copy(base)
        optimizer = SAM(model.parameters())
        if named:
            name(optimizer, model)
        results.append(train_sam(model, optimizer, bads))
    assert_same(results[0], results[1])
    with autoamp.disabled():
        model = fresh_copy(base)
        plain = train_sam(model, Tellable(model.parameters()), set())
    for (weights, _), (exact, _) in zip(results[0], plain, strict=True):
        for key in exact:
            assert torch.allclose(weights[key], exact[key], atol=0.02)


class Tellable(SAM):
    step_was_skipped = False


def test_first_step_that_cannot_be_stopped_is_an_error(base: nn.Module) -> None:
    """Not named, not torch's, and it has moved the weights already."""
    model = fresh_copy(base)
    loss_of(model, 0).backward()
    optimizer = SAM(model.parameters())
    before = weights_of(model)
    with pytest.raises(autoamp.LossScaleError) as raised:
        optimizer.step(evaluation(model, 0, HUGE))
    says(raised, "SAM")
    assert_same(weights_of(model), before)
