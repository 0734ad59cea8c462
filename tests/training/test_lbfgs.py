"""LBFGS: an overflow inside a line search is evaluated again at a lower scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp import LossScaleError
from tests.says import says
from tests.training.steps import (
    HUGE,
    assert_same,
    begin_at,
    fresh_copy,
    loss_of,
    moved,
    name,
    scaling_of,
    state_of,
    weights_of,
)

pytestmark = pytest.mark.one_model

SEARCHES = [None, "strong_wolfe"]


def lbfgs(model: nn.Module, search: str | None, named: bool = True) -> Any:
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=6, line_search_fn=search
    )
    return name(optimizer, model) if named else optimizer


class Closure:
    """Evaluates batch `number`; the evaluations in `bads` overflow until scaled down.

    `while_above`: they overflow as long as the loss scale is above it.
    """

    def __init__(
        self,
        model: nn.Module,
        number: int,
        bads: tuple[int, ...] = (),
        while_above: float = 2.0**14,
    ) -> None:
        self.model, self.number, self.bads = model, number, bads
        self.while_above = while_above
        self.good = self.calls = 0

    def __call__(self) -> Any:
        assert torch.is_grad_enabled()
        self.model.zero_grad()
        self.calls += 1
        high = scaling_of(self.model).loss_scale.scale > self.while_above
        bad = self.good in self.bads and high
        self.good += not bad
        loss = loss_of(self.model, self.number, HUGE if bad else 1.0)
        loss.backward()
        return loss


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("search", SEARCHES)
def test_an_overflow_in_a_search_leaves_no_trace(
    base: nn.Module, search: str | None, bad: int, named: bool
) -> None:
    results = []
    for bads in ((), (bad,)):
        model = fresh_copy(base)
        optimizer = lbfgs(model, search, named)
        losses, calls = [], []
        for number in range(3):
            closure = Closure(model, number % 2, bads if number == 0 else ())
            with torch.no_grad():
                losses.append(float(optimizer.step(closure).detach()))
            calls.append(closure.good)
            assert closure.calls == closure.good + (number == 0 and bool(bads))
            assert optimizer.step_was_skipped is False
        results.append((losses, calls, weights_of(model), state_of(optimizer)))
        scale = scaling_of(model).loss_scale
        assert scale.scale == 2.0 ** (14 if bads else 15)
        assert scale.skipped_steps == 0
        # One for each step, however many evaluations; a first one is not counted that
        # began before the optimizer was known.
        assert scale.growth_tracker > 0
    assert_same(results[0], results[1])
    assert len(set(results[0][0])) == 3


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("bad", [0, 2])
def test_hopeless_overflow_at_the_floor_is_an_error_and_puts_everything_back(
    base: nn.Module, search: str | None, bad: int, at: int
) -> None:
    model = fresh_copy(base, min_scale=2.0**12)
    optimizer = lbfgs(model, search)
    if at:
        optimizer.step(Closure(model, 0))
    before = weights_of(model), state_of(optimizer)
    with pytest.raises(LossScaleError) as raised:
        optimizer.step(Closure(model, 1, (bad,), while_above=0.0))
    says(raised, 4096, op="linear")
    assert_same((weights_of(model), state_of(optimizer)), before)
    assert optimizer.step_was_skipped is True


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("bad", [0, 2])
def test_static_scale_skips_and_puts_everything_back(
    base: nn.Module, search: str | None, bad: int
) -> None:
    results = []
    for planted in (False, True):
        model = fresh_copy(base)
        begin_at(scaling_of(model), autoamp.StaticLossScale(2.0**15))
        optimizer = lbfgs(model, search)
        for number in range(3):
            if planted and number == 1:
                before = weights_of(model), state_of(optimizer)
                closure = Closure(model, 9, (bad,), while_above=0.0)
                loss = optimizer.step(closure)
                assert float(loss.detach()) > HUGE / 100  # the bad one is given back
                assert optimizer.step_was_skipped is True
                assert_same((weights_of(model), state_of(optimizer)), before)
            optimizer.step(Closure(model, number))
            assert optimizer.step_was_skipped is False
        results.append((weights_of(model), state_of(optimizer)))
        assert scaling_of(model).loss_scale.skipped_steps == planted
    assert_same(results[0], results[1])


@pytest.mark.parametrize("bad", [0, 2])
def test_first_step_of_one_that_was_not_named(base: nn.Module, bad: int) -> None:
    """It has begun and cannot be skipped any more: an error, and nothing written."""
    model = fresh_copy(base, min_scale=2.0**13)
    optimizer = lbfgs(model, "strong_wolfe", named=False)
    before = weights_of(model)
    with pytest.raises(LossScaleError):
        optimizer.step(Closure(model, 1, (bad,), while_above=0.0))
    assert_same(weights_of(model), before)
    optimizer.step(Closure(model, 1))
    assert moved(before, model)


def test_several_ranks_skip_what_one_alone_would_evaluate_again(
    base: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss scale of another rank may not have moved: that rank skips."""
    monkeypatch.setattr("autoamp.compat.are_several", lambda: True)
    model = fresh_copy(base)
    optimizer = lbfgs(model, None)
    closure, before = Closure(model, 0, (0,)), weights_of(model)
    optimizer.step(closure)
    assert optimizer.step_was_skipped
    assert closure.calls == 1
    assert_same(weights_of(model), before)
