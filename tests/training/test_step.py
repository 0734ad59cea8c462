"""A step that meets an overflow changes nothing, whatever the optimizer is."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import autoamp
from tests.training.steps import (
    HUGE,
    OPTIMIZERS,
    WIDTH,
    assert_same,
    batch,
    converted,
    fresh_copy,
    loss_of,
    moved,
    name,
    scaling_of,
    state_of,
    weights_of,
)

pytestmark = [pytest.mark.one_model, pytest.mark.usefixtures("device")]

STEPS = 5
FOUND = ("named", "before the first call", "after a forward", "after a backward")
"""How and when the optimizer comes to have a boundary."""


class Run:
    """One training run, and its state after every step."""

    def __init__(
        self,
        base: nn.Module,
        make: Callable[[nn.Module], Optimizer],
        found: str = "named",
        scheduler: str = "none",
    ) -> None:
        self.model = fresh_copy(base)
        self.make, self.found, self.scheduler = make, found, scheduler
        self.hooks: list[str] = []
        self.records: list[tuple[Any, Any]] = []
        self.optimizer: Any = None
        self.schedulers: list[Any] = []
        if found in FOUND[:2]:
            self.start()

    def start(self) -> None:
        optimizer = self.optimizer = self.make(self.model)
        if self.scheduler == "before":
            self.schedule()
        if self.found == "named":
            name(optimizer, self.model)
        if self.scheduler == "after":
            self.schedule()
        optimizer.register_step_pre_hook(lambda *_: self.hooks.append("pre"))
        optimizer.register_step_post_hook(lambda *_: self.hooks.append("post"))

    def schedule(self) -> None:
        made = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        self.schedulers.append(made)

    def step(self, number: int, factor: float = 1.0) -> bool:
        """One step; whether it was skipped."""
        loss = loss_of(self.model, number, factor)
        if self.found == "after a forward" and self.optimizer is None:
            self.start()
        loss.backward()
        if self.optimizer is None:
            self.start()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.zero_grad()  # Muon has not all of them
        for scheduler in self.schedulers:
            scheduler.step()
        self.records.append((weights_of(self.model), self.state()))
        return bool(self.optimizer.step_was_skipped)

    def state(self) -> dict[str, Any]:
        state = state_of(self.optimizer)
        for group in state["param_groups"]:
            group.pop("initial_lr", None)
        return state


_CLEAN: dict[str, Any] = {}


def clean_records(base: nn.Module, label: str) -> Any:
    """The records of a run that saw no bad batch."""
    if label not in _CLEAN:
        clean = Run(base, OPTIMIZERS[label])
        assert not any(clean.step(i) for i in range(STEPS))
        _CLEAN[label] = clean.records
    return _CLEAN[label]


def check_skips(  # noqa: PLR0917
    base: nn.Module,
    label: str,
    bad: int,
    found: str = "named",
    scheduler: str = "none",
    factor: float = HUGE,
) -> None:
    """Trains with a bad batch before good batch number `bad`, and without."""
    clean = clean_records(base, label)
    dirty = Run(base, OPTIMIZERS[label], found, scheduler)
    before = weights_of(dirty.model), state_of(OPTIMIZERS[label](dirty.model))
    for number in range(bad):
        assert not dirty.step(number)
    hooks = list(dirty.hooks)
    assert dirty.step(99, factor), "the bad batch was not noticed"
    at_bad = dirty.records.pop()
    assert_same(at_bad, dirty.records[-1] if bad else before)
    # A GPU's kernel decides, except about the first step, which makes the state: hooks
    # fire as under GradScaler, and nobody looks for the op to blame.
    on_gpu = torch.get_default_device().type == "cuda"
    by_kernel = "fused" in label and on_gpu and bad > 0
    fired = ["pre", "post"] if by_kernel else []
    assert dirty.hooks == [*hooks, *fired]
    for number in range(bad, STEPS):
        assert not dirty.step(number)
    assert_same(dirty.records, clean)
    assert dirty.hooks == [*fired, *["pre", "post"] * STEPS]
    report = autoamp.report(dirty.model).loss_scale
    assert report.scale == 2.0**14
    assert report.skipped_steps == 1
    assert len(report.skips) == (not by_kernel)
    assert report.growth_tracker == STEPS - bad


@pytest.mark.thorough(but=["cpu-OldStyle", "cpu-AdamW-foreach", "cpu-SGD-fused"])
@pytest.mark.parametrize("label", OPTIMIZERS)
def test_skipped_step_changes_nothing(base: nn.Module, label: str) -> None:
    # A sample of the whole product, another one for each optimizer.
    place = list(OPTIMIZERS).index(label)
    found, scheduler = FOUND[place % 4], ("none", "before", "after")[place % 3]
    check_skips(base, label, (0, 1, 3)[place // 2 % 3], found, scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("label", OPTIMIZERS)
def test_skipped_step_changes_nothing_whatever_the_order(
    base: nn.Module, label: str
) -> None:
    product = itertools.product((0, 1, 3), FOUND, ("none", "before", "after"))
    for bad, found, scheduler in product:
        check_skips(base, label, bad, found, scheduler)


@pytest.mark.thorough(
    but=[
        "cpu-named-inf",
        "cpu-named-nan",
        "cpu-before the first call--inf",
        "cpu-after a forward--inf",
        "cpu-after a backward-inf",
        "cpu-after a backward-nan",
    ]
)
@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("found", FOUND)
def test_infinite_and_undefined_losses(
    base: nn.Module, found: str, factor: float
) -> None:
    check_skips(base, "SGD", 0, found, factor=factor)


# -- what happens between backward and step --------------------------------------------


def sgd(model: nn.Module, **options: Any) -> Any:
    return name(
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, **options), model
    )


def clip_value(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def clip_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def nothing(model: nn.Module) -> None:
    pass


CLIPS = {"value": clip_value, "norm": clip_norm, "none": nothing}


@pytest.mark.thorough(
    but=[
        "cpu-True-value-True",
        "cpu-True-norm-True",
        "cpu-True-none-True",
        "cpu-False-value-False",
        "cpu-False-norm-False",
        "cpu-False-none-False",
    ]
)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("named", [True, False])
def test_clipping_hides_nothing(
    base: nn.Module, clip: str, set_to_none: bool, named: bool
) -> None:
    finals = []
    for bads in ((), (0, 2)):
        model = fresh_copy(base)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        for number in range(4):
            for factor in (HUGE, 1.0) if number in bads else (1.0,):
                optimizer.zero_grad(set_to_none)
                loss_of(model, number, factor).backward()
                CLIPS[clip](model)
                if named and number == 0:
                    name(optimizer, model)
                optimizer.step()
                assert optimizer.step_was_skipped == (factor != 1.0)
        finals.append(weights_of(model))
    assert_same(finals[0], finals[1])


@pytest.mark.parametrize("named", [True, False])
def test_infinities_that_clipping_made_finite(named: bool) -> None:
    """No NaN among them, which clipping would leave."""
    model = converted(nn.Linear(WIDTH, 4))
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    if named:
        name(optimizer, model)
    for number, factor in enumerate((1.0, HUGE, 1.0)):
        before = weights_of(model)
        (model(torch.ones(2, WIDTH)).sum() * factor).backward()
        clip_value(model)
        assert all(p.grad.isfinite().all() for p in model.parameters()), number
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped == (factor != 1.0)
        assert moved(before, model) == (factor == 1.0)


@pytest.mark.parametrize("accumulated", [False, True])
def test_infinite_gradients_that_were_never_zeroed_do_not_reach_the_weights(
    base: nn.Module, accumulated: bool
) -> None:
    model = fresh_copy(base)
    optimizer = sgd(model)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = weights_of(model)
    loss_of(model, 1, HUGE).backward()
    optimizer.step()
    for number in range(3):
        if accumulated:
            loss_of(model, number).backward()
        optimizer.step()
        assert optimizer.step_was_skipped
        assert_same(weights_of(model), before)
    optimizer.zero_grad()
    loss_of(model, 5).backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert moved(before, model)


def test_step_without_backward(base: nn.Module) -> None:
    model = fresh_copy(base)
    optimizer = sgd(model, weight_decay=0.1)
    before = weights_of(model)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert_same(weights_of(model), before)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()  # gradients that are not ours
    assert not optimizer.step_was_skipped
    assert moved(before, model)
    assert scaling_of(model).loss_scale.growth_tracker == 0


def test_overflow_that_reaches_some_weights_only(base: nn.Module) -> None:
    """The weights of the first layer are frozen, or the last layer's are."""
    for frozen in (0, 2):
        model = fresh_copy(base)
        optimizer = sgd(model)
        for p in model[frozen].parameters():
            p.requires_grad_(False)
        before = weights_of(model)
        loss_of(model, 0, HUGE).backward()
        optimizer.step()
        assert optimizer.step_was_skipped
        assert_same(weights_of(model), before)


# -- two at once -----------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("clip", CLIPS)
def test_two_optimizers_after_one_backward(
    base: nn.Module, named: bool, clip: str
) -> None:
    model: Any = fresh_copy(base, growth_interval=3)
    optimizers: list[Any] = [
        torch.optim.Adam(model[0].parameters()),
        torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9),
    ]
    if named:
        for optimizer in optimizers:
            name(optimizer, model)
    scales = []
    for number, factor in enumerate((HUGE, 1.0, 1.0, 1.0, HUGE, 1.0)):
        before = weights_of(model)
        loss_of(model, number, factor).backward()
        CLIPS[clip](model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.step_was_skipped == (factor != 1.0)
        assert moved(before, model) == (factor == 1.0)
        scales.append(scaling_of(model).loss_scale.scale)
    assert [math.log2(s) for s in scales] == [14, 14, 14, 15, 14, 14]


def test_batches_are_what_they_seem() -> None:
    """The bad batch is bad, and the good ones are good, without any scaling at all."""
    model = nn.Linear(WIDTH, 4)
    x, y = batch(0)
    assert torch.isfinite(x).all()
    assert torch.isfinite(nn.functional.mse_loss(model(x), y) * 2.0**15)
    assert not math.isfinite(torch.tensor(HUGE) * 2.0**15)


def test_the_log_tells_why(caplog: pytest.LogCaptureFixture) -> None:
    model = converted()
    optimizer = name(torch.optim.SGD(model.parameters(), 0.1), model)
    with caplog.at_level(logging.DEBUG, "autoamp.training"):
        for factor in (1.0, HUGE):
            loss_of(model, 0, factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    own = [r for r in caplog.records if r.name == "autoamp.training.boundary"]
    told = [r.getMessage() for r in own]
    assert told == [
        "autoamp: step 0 of SGD: no gradient overflows",
        "autoamp: step 1 of SGD: gradients overflow",
    ]
