"""Schedulers that ask an optimizer's wrapper hold at the steps that autoamp skips."""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.optim import Optimizer

import autoamp
from tests.training.steps import (
    BF16,
    HUGE,
    as_on_a_gpu,
    batch,
    converted,
    fresh_copy,
    let_go,
    loss_of,
    name,
)

STEPS = 10
BAD = {0, 3, 4}


@pytest.fixture(autouse=True)
def _own_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    autoamp.disable()
    AcceleratorState._reset_state(reset_partial_state=True)


def accelerator(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, **options)


def parts(optimizers: int = 1) -> tuple[nn.Module, list[Optimizer], list[Any]]:
    """A model, its optimizers, each of one layer or more, and their schedulers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    params = list(model.parameters())
    share = len(params) // optimizers
    each = [
        torch.optim.AdamW(params[i * share : (i + 1) * share], lr=1e-2)
        for i in range(optimizers)
    ]
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, STEPS) for o in each]
    return model, each, schedulers


def history(
    given: Accelerator,
    model: nn.Module,
    optimizers: list[Any],
    schedulers: list[Any],
    bad: set[int],
) -> list[Any]:
    """After each batch, whether a step was skipped, and the learning rates."""
    seen: list[Any] = []
    for number in range(STEPS):
        x, y = batch(number)
        with given.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            given.backward(loss * HUGE if number in bad else loss)
            for each in [*optimizers, *schedulers]:
                each.step()
            for each in optimizers:
                each.zero_grad()
        rates = [s.get_last_lr()[0] for s in schedulers]
        seen.append((bool(given.optimizer_step_was_skipped), *rates))
    return seen


def under_its_own_scaler(optimizers: int, bad: set[int], **options: Any) -> list[Any]:
    """The history of accelerate alone, with the GradScaler that it has in fp16."""
    AcceleratorState._reset_state(reset_partial_state=True)
    given = accelerator(**options)
    # accelerate makes this GradScaler on a GPU only.
    given.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    model, each, schedulers = parts(optimizers)
    model, *rest = given.prepare(model, *each, *schedulers)
    found = history(given, model, rest[:optimizers], rest[optimizers:], bad)
    AcceleratorState._reset_state(reset_partial_state=True)
    return found


def prepared_first(given: Accelerator, optimizers: int) -> Any:
    model, each, schedulers = parts(optimizers)
    model, *rest = given.prepare(model, *each, *schedulers)
    autoamp.convert(model, rest[:optimizers], **BF16)
    return model, rest


def converted_first(given: Accelerator, optimizers: int) -> Any:
    model, each, schedulers = parts(optimizers)
    autoamp.convert(model, each, **BF16)
    model, *rest = given.prepare(model, *each, *schedulers)
    return model, rest


def met(given: Accelerator, optimizers: int) -> Any:
    model, each, schedulers = parts(optimizers)
    model, *rest = given.prepare(model, *each, *schedulers)
    autoamp.convert(model, **BF16)
    return model, rest


def automatic(given: Accelerator, optimizers: int) -> Any:
    autoamp.enable(precision="bf16", loss_scale="dynamic", do_no_harm=False)
    model, each, schedulers = parts(optimizers)
    model, *rest = given.prepare(model, *each, *schedulers)
    return model, rest


WAYS = [prepared_first, converted_first, met, automatic]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("optimizers", "accumulated"), [(1, 1), (1, 2), (2, 1)])
def test_schedules_are_those_under_accelerates_own_scaler(
    way: Any, optimizers: int, accumulated: int
) -> None:
    options = {"gradient_accumulation_steps": accumulated}
    expected = under_its_own_scaler(optimizers, BAD, **options)
    assert {True, False} == {skipped for skipped, *_ in expected}
    given = accelerator(**options)
    model, rest = way(given, optimizers)
    seen = history(given, model, rest[:optimizers], rest[optimizers:], BAD)
    assert seen == expected


@pytest.mark.parametrize("split", [False, True])
def test_a_scheduler_that_steps_for_each_process_holds_too(
    split: bool, monkeypatch
) -> None:
    data = DataLoaderConfiguration(split_batches=split)
    given = accelerator(dataloader_config=data)
    model, rest = met(given, 1)
    two = SimpleNamespace(num_processes=2)
    monkeypatch.setattr("accelerate.scheduler.AcceleratorState", lambda: two)
    steps = 0
    seen = history(given, model, rest[:1], rest[1:], BAD)
    for number, (skipped, rate) in enumerate(seen):
        assert skipped == (number in BAD)
        steps += 0 if skipped else 1 if split else 2
        assert rate == pytest.approx(1e-2 * (1 - 0.9 * min(steps / STEPS, 1)))


def test_in_bf16_the_guard_s_skipped_steps_count_as_little() -> None:
    given = accelerator()
    model, each, schedulers = parts()
    model, *rest = given.prepare(model, *each, *schedulers)
    autoamp.convert(model, precision="bf16", do_no_harm=False)
    x, y = batch(0)
    seen = []
    for factor in (1.0, torch.inf, 1.0):
        (nn.functional.mse_loss(model(x), y) * factor).backward()
        for one in rest:
            one.step()
        rest[0].zero_grad()
        seen.append((rest[0].step_was_skipped, rest[1].scheduler.last_epoch))
    assert seen == [(False, 1), (True, 1), (False, 2)]


@pytest.fixture(scope="module")
def base() -> nn.Module:
    return converted()


def test_a_wrapper_shows_a_step_that_the_kernel_skips(
    base: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    model = fresh_copy(base)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    wrapper = accelerator().prepare(name(optimizer, model))
    for factor in (1.0, 1.0, HUGE, 1.0):
        loss_of(model, 0, factor).backward()
        wrapper.step()
        wrapper.zero_grad()
        assert bool(wrapper.step_was_skipped) == (factor != 1.0)
    assert isinstance(wrapper.step_was_skipped, torch.Tensor)


@pytest.mark.parametrize("end", ["revert", "disable"])
def test_a_wrapper_does_not_hold_for_good_after_autoamp_has_gone(end: str) -> None:
    given = accelerator()
    model, rest = (automatic if end == "disable" else met)(given, 1)
    x, y = batch(0)
    (nn.functional.mse_loss(model(x), y) * HUGE).backward()
    rest[0].step()
    assert given.optimizer_step_was_skipped
    autoamp.disable() if end == "disable" else autoamp.revert(model)
    assert rest[0].step_was_skipped is False
    assert not hasattr(rest[0].optimizer, "step_was_skipped")


class Plain(Optimizer):
    """A wrapper with a plain mark, inside which another one may be."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.step_was_skipped = optimizer, False
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Stranger:
    """No optimizer, though its step steps one, and it has a mark of that name."""

    step_was_skipped = property(lambda self: self._is_overflow)

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self._is_overflow = optimizer, "mine"

    def step(self) -> None:
        self.optimizer.step()


class WithOther(Plain):
    """An optimizer that holds one optimizer and steps another with it."""

    def __init__(self, held: Optimizer, other: Optimizer) -> None:
        super().__init__(held)
        self.other = other

    def step(self, closure: Any = None) -> Any:
        return self.other.step(closure)


def test_wrappers_that_hold_the_optimizer_are_marked_and_no_others(
    base: nn.Module,
) -> None:
    model = fresh_copy(base)
    inner = name(torch.optim.SGD(model.parameters(), lr=0.1), model)
    outermost = Plain(accelerator().prepare(inner))
    between = outermost.optimizer
    idle = AcceleratedOptimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    stranger, other = Stranger(outermost), WithOther(idle, outermost)
    for factor in (HUGE, 1.0):
        for by in (outermost, stranger, other):
            loss_of(model, 0, factor).backward()
            by.step()
            inner.zero_grad()
            bad = factor != 1.0
            found = [w.step_was_skipped for w in (inner, between, outermost)]
            assert found == [bad] * 3
            assert not idle.step_was_skipped
            assert stranger.step_was_skipped == "mine"
            assert other.step_was_skipped is False


def test_a_wrapper_with_a_scaler_is_left_to_it(base: nn.Module) -> None:
    given = accelerator()
    given.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    model = fresh_copy(base)
    wrapper = given.prepare(name(torch.optim.SGD(model.parameters(), lr=0.1), model))
    for factor, skipped in ((1.0, False), (torch.inf, True)):
        given.backward(loss_of(model, 0, factor))
        wrapper.step()
        wrapper.zero_grad()
        assert wrapper.step_was_skipped is skipped
    let_go(wrapper)
    assert wrapper.step_was_skipped is True


def test_a_wrapper_is_freed_and_copied_with_its_mark(base: nn.Module) -> None:
    model = fresh_copy(base)
    optimizer = name(torch.optim.SGD(model.parameters(), lr=0.1), model)
    wrapper = accelerator().prepare(optimizer)
    loss_of(model, 0, HUGE).backward()
    wrapper.step()
    assert copy.deepcopy(wrapper).step_was_skipped is True
    gone = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert gone() is None
