"""The guard: a step with a gradient that is not finite changes nothing, in bf16 too.

A run that meets a bad gradient is held against one that never saw that batch, to the
bit, and a run without a bad gradient against one without the guard.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp import compat
from tests.says import says
from tests.training.steps import (
    Reads,
    as_on_a_gpu,
    assert_same,
    is_watched,
    loss_of,
    mlp,
    state_of,
    weights_of,
)

pytestmark = pytest.mark.one_model

GUARDED: dict[str, Any] = {"precision": "bf16", "do_no_harm": False, "strict": True}
STEPS = 4
VALUES = (math.inf, -math.inf, math.nan)


def guarded(model: nn.Module | None = None, **options: Any) -> nn.Module:
    return autoamp.convert(model or mlp(), **{**GUARDED, **options})


def poison(model: nn.Module, value: float = math.inf) -> None:
    """Makes one number of the last matrix's gradient `value`."""
    grad = [p.grad for p in model.parameters() if p.dim() > 1][-1]
    assert grad is not None
    grad.view(-1)[0] = value


def train(
    model: nn.Module,
    optimizer: Any,
    steps: list[int],
) -> list[bool]:
    """Trains on the batches `steps`, of which -1 is a bad one; which were skipped."""
    skipped = []
    for number in steps:
        optimizer.zero_grad()
        loss_of(model, abs(number)).backward()
        if number < 0:
            poison(model)
        optimizer.step()
        skipped.append(bool(optimizer.step_was_skipped))
    return skipped


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, **options)


# -- what is skipped -------------------------------------------------------------------


def by_largest(grads: Any) -> Tensor:
    """What is done on a GPU."""
    largest = torch._foreach_norm([*grads], torch.inf)
    return (~torch.stack(list(largest)).isfinite()).any().float().reshape(1)


@pytest.mark.parametrize("value", VALUES)
def test_a_kernel_skips_without_a_wait(value: float, monkeypatch: Any) -> None:
    """Only the first step waits: its state has to be made, or not."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(compat, "any_not_finite", by_largest)
    model, clean = mlp(), mlp()
    clean.load_state_dict(model.state_dict())
    runs = []
    for each, batches in ((guarded(model), [1, -5, 2]), (guarded(clean), [1, 2])):
        optimizer = adamw(each, fused=True)
        autoamp.convert(each, optimizer, **GUARDED)
        for number in batches:
            optimizer.zero_grad()
            loss_of(each, abs(number)).backward()
            if number < 0:
                poison(each, value)
            with Reads() as reads:
                optimizer.step()
            assert (reads.count > 0) == (number == 1)
            assert bool(optimizer.step_was_skipped) == (number < 0)
        runs.append((weights_of(each), state_of(optimizer)))
    assert_same(*runs)
    found = autoamp.report(model).loss_scale
    assert found is not None
    assert found.skipped_steps == 1


# -- what is not changed ---------------------------------------------------------------


def test_without_the_guard_nothing_is_attached() -> None:
    model = guarded(guard=False)
    optimizer = adamw(model)
    loss_of(model, 1).backward()
    poison(model)
    optimizer.step()
    assert not is_watched(optimizer)
    assert "step" not in optimizer.__dict__
    assert not all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_model_that_stays_fp32_is_left_alone() -> None:
    model = guarded(keep=["*"])
    optimizer = adamw(model)
    loss_of(model, 1).backward()
    poison(model)
    optimizer.step()
    assert not is_watched(optimizer)


def test_an_optimizer_of_another_model_is_left_alone() -> None:
    model, other = guarded(), mlp()
    mine, stranger = adamw(model), adamw(other)
    loss_of(model, 1).backward()
    mine.step()
    loss_of(other, 1).backward()
    poison(other)
    stranger.step()
    assert is_watched(mine)
    assert not is_watched(stranger)
    autoamp.convert(other, **GUARDED)
    stranger.zero_grad()
    loss_of(other, 1).backward()
    stranger.step()
    assert stranger.step_was_skipped, "weights that are NaN give gradients that are NaN"


def test_converted_again_without_the_guard() -> None:
    model = guarded()
    optimizer = adamw(model)
    train(model, optimizer, [1])
    autoamp.convert(model, **GUARDED, guard=False)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    poison(model)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert not all(bool(p.isfinite().all()) for p in model.parameters())


def test_large_gradients_are_finite() -> None:
    """A sum of gradients overflows where no gradient does."""
    model = guarded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-38)
    loss_of(model, 1).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.fill_(3e38)
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_a_grad_scaler_of_the_scripts_own_decides() -> None:
    model = guarded()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 1)).backward()
        if bad:
            poison(model)
        before = weights_of(model)
        scaler.step(optimizer)
        scaler.update()
    assert_same(weights_of(model), before)
    assert scaler.get_scale() == 4.0
    assert autoamp.report(model).loss_scale is None, "the guard has skipped nothing"


# -- what is said ----------------------------------------------------------------------


def test_the_report_counts_and_says_why() -> None:
    model = guarded()
    optimizer = adamw(model)
    train(model, optimizer, [1])
    assert autoamp.report(model).loss_scale is None
    train(model, optimizer, [-1, 1, -2])
    found = autoamp.report(model).loss_scale
    assert found is not None
    assert found.kind == "NoLossScale"
    assert found.skipped_steps == 2
    for told, step in zip(found.skips, ("step 2", "step 4"), strict=True):
        says(told, step, module="of 2.weight is")
    for param in model.parameters():
        param.grad = torch.full_like(param, math.nan)
    optimizer.step()
    found = autoamp.report(model).loss_scale
    assert found is not None
    says(found.skips[-1], "step 5", "3 more", module="0.weight")
    says(" ".join(str(autoamp.report(model)).split()), "3 steps")


def test_one_warning_then_one_that_says_training_stands_still(caplog: Any) -> None:
    model = guarded()
    optimizer = adamw(model)
    with caplog.at_level(logging.WARNING):
        train(model, optimizer, [-1])
        (first,) = [r.message for r in caplog.records]
        says(first, "step 1", module="2.weight", option="guard=False")
        train(model, optimizer, [-2, -3, -4])
    said = [r.message for r in caplog.records][1:]
    assert len(said) == 1
    says(said[0], "3 steps", option="find_overflow")


def test_a_static_scale_says_that_it_never_moves(caplog: Any) -> None:
    model = guarded(loss_scale=8.0)
    optimizer = adamw(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            optimizer.zero_grad()
            (loss_of(model, 1) * math.inf).backward()
            optimizer.step()
    says([r.message for r in caplog.records], "3 steps", "never moves")


def test_the_option() -> None:
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.convert(mlp(), guard="yes")
    says(raised, option="guard='yes'")
