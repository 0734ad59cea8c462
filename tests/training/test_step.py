"""A step that meets an overflow changes nothing, whatever the optimizer is."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from tests.training.steps import (
    HUGE,
    OPTIMIZERS,
    WIDTH,
    assert_same,
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

STEPS = 4
NAMED, FIRST, LATER = "named", "before the first call", "after a backward"
"""How and when the optimizer comes to have a boundary."""


def run(
    model: nn.Module, label: str, found: str, scheduled: str, factors: list[float]
) -> tuple[Any, list[Any], list[str]]:
    """Trains; the optimizer, what each good step left, and the hooks that fired."""
    optimizer: Any = None
    fired: list[str] = []
    records: list[Any] = []

    def start() -> Any:
        made = OPTIMIZERS[label](model)
        schedule = [lambda: torch.optim.lr_scheduler.StepLR(made, 99)]
        attached = [lambda: name(made, model)] * (found == NAMED)
        order = [*schedule, *attached] if scheduled == "before" else [*attached]
        for each in [*order, *schedule * (scheduled == "after")]:
            each()
        made.register_step_pre_hook(lambda *_: fired.append("pre"))
        made.register_step_post_hook(lambda *_: fired.append("post"))
        return made

    if found != LATER:
        optimizer = start()
    good = 0
    for factor in factors:
        before = weights_of(model)
        loss_of(model, good, factor).backward()
        optimizer = optimizer or start()
        optimizer.step()
        model.zero_grad()
        assert optimizer.step_was_skipped == (factor != 1.0)
        if factor == 1.0:
            good += 1
            records.append((weights_of(model), state_of(optimizer)))
        else:
            assert_same(weights_of(model), before)
    for _, state in records:
        for group in state["param_groups"]:
            group.pop("initial_lr", None)
    return optimizer, records, fired


@pytest.mark.thorough(
    but=["cpu-SGD-named-no-0-inf", "cpu-AdamW-foreach-named-after-3-1e+38"]
)
@pytest.mark.parametrize(
    ("label", "found", "scheduled", "bad", "factor"),
    [
        ("SGD", NAMED, "no", 0, math.inf),
        ("SGD", LATER, "no", 0, math.nan),
        ("Adam", LATER, "after", 1, HUGE),
        ("SGD-fused", FIRST, "before", 0, HUGE),
        ("OldStyle", FIRST, "no", 0, HUGE),
        ("AdamW-foreach", NAMED, "after", 3, HUGE),
        ("Adam-fused", NAMED, "before", 1, -math.inf),
    ],
)
def test_a_skipped_step_changes_nothing_however_its_optimizer_is_found(  # noqa: PLR0917
    base: nn.Module, label: str, found: str, scheduled: str, bad: int, factor: float
) -> None:
    """For each optimizer see test_table.py."""
    _, clean, _ = run(fresh_copy(base), label, NAMED, "no", [1.0] * STEPS)
    model = fresh_copy(base)
    factors = [*[1.0] * bad, factor, *[1.0] * (STEPS - bad)]
    _, dirty, fired = run(model, label, found, scheduled, factors)
    assert_same(dirty, clean)
    # A GPU's kernel decides, except about the first step, which makes the state: hooks
    # fire as under GradScaler, and nobody looks for the op to blame.
    on_gpu = torch.get_default_device().type == "cuda"
    by_kernel = "fused" in label and on_gpu and bad > 0
    assert fired == ["pre", "post"] * (STEPS + by_kernel)
    report = autoamp.report(model).loss_scale
    assert report is not None
    assert (report.scale, report.skipped_steps) == (2.0**14, 1)
    assert len(report.skips) == (not by_kernel)
    assert report.growth_tracker == STEPS - bad


# -- what happens between backward and step --------------------------------------------


def sgd(model: nn.Module, **options: Any) -> Any:
    return name(
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, **options), model
    )


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
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        assert all(p.grad.isfinite().all() for p in model.parameters()), number
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped == (factor != 1.0)
        assert moved(before, model) == (factor == 1.0)


@pytest.mark.parametrize("as_on_gpu", [False, True])
@pytest.mark.parametrize("accumulated", [False, True])
def test_infinite_gradients_that_were_never_zeroed_do_not_reach_the_weights(
    base: nn.Module, accumulated: bool, as_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_gpu:
        for module in ("step", "scale"):
            free = f"autoamp.training.{module}.free_to_read"
            monkeypatch.setattr(free, lambda _: False)
    model = fresh_copy(base)
    optimizer = sgd(model, fused=True) if as_on_gpu else sgd(model)
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
    for set_to_none in (False, True):
        optimizer.zero_grad(set_to_none)
        before = weights_of(model)
        loss_of(model, 5).backward()
        optimizer.step()
        assert not optimizer.step_was_skipped
        assert moved(before, model)


def test_step_without_backward(base: nn.Module) -> None:
    model = fresh_copy(base)
    optimizer = sgd(model, weight_decay=0.1)
    loss_of(model, 0)
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
