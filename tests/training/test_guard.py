"""The guard: a step with a gradient that is not finite changes nothing, in bf16 too.

A run that meets a bad gradient is held against one that never saw that batch, to the
bit, and a run without a bad gradient against one without the guard.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp import compat
from autoamp.training.attach import boundary_of
from tests.training.steps import (
    Reads,
    assert_same,
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


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp16", "loss_scale": "off"},
        {"precision": "fp16", "loss_scale": 8.0},
        {"precision": "bf16", "loss_scale": 8.0},
        {"precision": "bf16", "loss_scale": "off"},
    ],
)
def test_loss_scales_that_do_not_move(options: dict[str, Any]) -> None:
    """An infinite loss, so that graphs with flags see the overflow as well."""
    model = guarded(**options)
    optimizer = adamw(model)
    train(model, optimizer, [1])
    before = weights_of(model)
    (loss_of(model, 2) * math.inf).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert_same(weights_of(model), before)


def test_parameters_of_a_model_that_is_not_converted() -> None:
    """No graph of ours has filled the bad gradient, whatever the precision."""
    for precision in ("bf16", "fp16"):
        model, other = guarded(precision=precision), mlp()
        other.requires_grad_(True)
        params = [*model.parameters(), *other.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.1)
        for bad in (False, True):
            optimizer.zero_grad()
            (loss_of(model, 1) + loss_of(other, 1)).backward()
            if bad:
                poison(other)
            before = weights_of(model), weights_of(other)
            optimizer.step()
            assert bool(optimizer.step_was_skipped) is bad
        assert_same((weights_of(model), weights_of(other)), before)


def test_sparse_gradients() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 8, sparse=True)
            self.out = nn.Linear(8, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.table(ids))

    model = guarded(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weights_of(model)
    model(torch.tensor([1, 1, 2])).sum().backward()
    grad = model.table.weight.grad
    assert grad is not None
    assert grad.is_sparse
    with torch.no_grad():
        grad._values().fill_(3e38)  # the two rows of one word add up to infinity
    optimizer.step()
    assert optimizer.step_was_skipped
    assert_same(weights_of(model), before)


def test_two_optimizers_of_one_model() -> None:
    """The optimizer whose gradients are finite takes its step."""
    model = guarded()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    last = torch.optim.SGD(model[2].parameters(), lr=0.1)
    before = weights_of(model)
    loss_of(model, 1).backward()
    poison(model)
    first.step()
    last.step()
    after = weights_of(model)
    assert (first.step_was_skipped, last.step_was_skipped) == (False, True)
    assert not torch.equal(after["0.weight"], before["0.weight"])
    assert_same(after["2.weight"], before["2.weight"])


def test_an_input_that_is_optimized() -> None:
    model = guarded().requires_grad_(False)
    image = torch.randn(2, 8, requires_grad=True)
    optimizer = torch.optim.SGD([image], lr=0.1)
    for bad in (False, True):
        optimizer.zero_grad()
        (model(image).sum() * (math.inf if bad else 1)).backward()
        before = image.detach().clone()
        optimizer.step()
        assert bool(optimizer.step_was_skipped) is bad
        assert torch.equal(image.detach(), before) is bad


def test_a_function_that_is_compiled() -> None:
    model = mlp()
    options = {**GUARDED, "backend": "eager"}
    compiled = torch.compile(model, backend="autoamp", options=options)
    optimizer = adamw(model)
    before = weights_of(model)
    loss_of(compiled, 1).backward()
    poison(model)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert_same(weights_of(model), before)


def by_largest(grads: Any) -> Tensor:
    """What is done on a GPU."""
    largest = torch._foreach_norm([*grads], torch.inf)
    return (~torch.stack(list(largest)).isfinite()).any().float().reshape(1)


@pytest.mark.parametrize("value", VALUES)
def test_a_kernel_skips_without_a_wait(value: float, monkeypatch: Any) -> None:
    """Only the first step waits: its state has to be made, or not."""
    for module in ("step", "skips"):
        free = f"autoamp.training.{module}.free_to_read"
        monkeypatch.setattr(free, lambda _: False)
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


def test_finite_runs_are_the_same_to_the_bit() -> None:
    base = mlp()
    runs = []
    for guard in (True, False):
        model = guarded(copy.deepcopy(base), guard=guard)
        optimizer = adamw(model)
        for number in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            assert optimizer.step() is None
        runs.append((weights_of(model), optimizer.state_dict()))
    assert_same(*runs)


def test_without_the_guard_nothing_is_attached() -> None:
    model = guarded(guard=False)
    optimizer = adamw(model)
    loss_of(model, 1).backward()
    poison(model)
    optimizer.step()
    assert boundary_of(optimizer) is None
    assert "step" not in optimizer.__dict__
    assert not all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_model_that_stays_fp32_is_left_alone() -> None:
    model = guarded(keep=["*"])
    optimizer = adamw(model)
    loss_of(model, 1).backward()
    poison(model)
    optimizer.step()
    assert boundary_of(optimizer) is None


def test_an_optimizer_of_another_model_is_left_alone() -> None:
    model, other = guarded(), mlp()
    mine, stranger = adamw(model), adamw(other)
    loss_of(model, 1).backward()
    mine.step()
    loss_of(other, 1).backward()
    poison(other)
    stranger.step()
    assert boundary_of(mine) is not None
    assert boundary_of(stranger) is None
    autoamp.convert(other, **GUARDED)
    stranger.zero_grad()
    loss_of(other, 1).backward()
    stranger.step()
    assert stranger.step_was_skipped, "weights that are NaN give gradients that are NaN"


def test_revert_takes_the_guard_away() -> None:
    model = guarded()
    optimizer = adamw(model)
    train(model, optimizer, [1])
    autoamp.revert(model)
    assert boundary_of(optimizer) is None
    loss_of(model, 1).backward()
    poison(model)
    optimizer.step()
    assert boundary_of(optimizer) is None


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
    assert found.skips == (
        "step 2: the gradient of 2.weight is not finite",
        "step 4: the gradient of 2.weight is not finite",
    )
    shown = " ".join(str(autoamp.report(model)).split())
    assert "There is no loss scale; 2 steps were skipped" in shown


def test_one_warning_then_one_that_says_training_stands_still(caplog: Any) -> None:
    model = guarded()
    optimizer = adamw(model)
    with caplog.at_level(logging.WARNING):
        train(model, optimizer, [-1])
        (first,) = [r.message for r in caplog.records]
        assert "skipped step 1: the gradient of 2.weight is not finite" in first
        assert "guard=False" in first
        train(model, optimizer, [-2, -3, -4])
    said = [r.message for r in caplog.records][1:]
    assert len(said) == 1
    assert "3 steps in a row were skipped" in said[0]
    assert "it has no loss scale" in said[0]
    assert "find_overflow" in said[0]


def test_a_static_scale_says_that_it_never_moves(caplog: Any) -> None:
    model = guarded(loss_scale=8.0)
    optimizer = adamw(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            optimizer.zero_grad()
            (loss_of(model, 1) * math.inf).backward()
            optimizer.step()
    said = [r.message for r in caplog.records if "in a row" in r.message]
    assert any("its loss scale never moves" in each for each in said)


def test_the_option() -> None:
    with pytest.raises(autoamp.OptionError, match="guard='yes' is not True or False"):
        autoamp.convert(mlp(), guard="yes")
