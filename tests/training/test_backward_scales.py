"""A backward sets its scale as it begins, and moves the loss scale as it ends."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

import autoamp
from autoamp import DynamicLossScale
from autoamp.training.ledger import BACKWARDS
from tests.says import says
from tests.training.odd_loops import Judged, loss_of
from tests.training.steps import FP16, WIDTH, OldStyle, batch, mlp, scaling_of

REAL_SCALES = True
START = 2.0**15


def trained(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    autoamp.convert(model, optimizer, **{**FP16, **options})
    return model, optimizer


def scale_of(model: nn.Module) -> float:
    return float(autoamp.report(model).loss_scale.scale)


def used() -> float:
    """The scale of the backward that has been."""
    return float(BACKWARDS.runs[-1].used)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def finite(tensors: list[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


# -- as it ends ------------------------------------------------------------------------


@pytest.mark.parametrize("none", [True, False])
def test_an_overflow_lowers_the_scale_although_no_step_follows(none: bool) -> None:
    model, optimizer = trained(Judged())
    loss_of(model, 0).backward()
    optimizer.step()
    for number in range(3):
        optimizer.zero_grad(set_to_none=none)
        loss_of(model, number, 1e6).backward()
        assert scale_of(model) == START / 2 ** (number + 1)


def test_micro_batches_of_one_scale_lower_it_once() -> None:
    model, _ = trained(Judged())
    losses = [loss_of(model, number, 1e6) for number in range(3)]
    torch.stack(losses).sum().backward()
    assert scale_of(model) == START / 2


def test_nan_lowers_the_scale_once_a_step_and_never_below_one() -> None:
    model, optimizer = trained(loss_scale=DynamicLossScale(4.0))
    expected = [2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    for number in range(3):
        for micro in range(2):
            (model(batch(micro)[0]).sum() * math.nan).backward()
            assert scale_of(model) == expected[2 * number + micro]
        optimizer.step()
        optimizer.zero_grad()


def test_clean_backwards_count_once_a_step() -> None:
    scale = DynamicLossScale(growth_interval=4, climbs=False)
    model, optimizer = trained(loss_scale=scale)
    for _ in range(3):
        for micro in range(5):
            loss_of_outputs(model, micro).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert (scale.growth_tracker, scale.scale) == (3, START)
    loss_of_outputs(model, 0).backward()
    assert (scale.growth_tracker, scale.scale) == (0, 2 * START)


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_models_that_were_given_one_scale_move_it_once(factor: float) -> None:
    scale = DynamicLossScale(climbs=False)
    models = [trained(Judged(), loss_scale=scale)[0] for _ in range(2)]
    losses = [loss_of(model, 0, factor) for model in models]
    torch.stack(losses).sum().backward()
    assert scale.growth_tracker == (factor == 1.0)
    assert scale.scale == (START if factor == 1.0 else START / 2)


def loss_of_outputs(model: nn.Module, number: int, factor: float = 1.0) -> Tensor:
    x, y = batch(number)
    return nn.functional.mse_loss(model(x), y) * factor


def test_a_second_derivative_that_overflows_lowers_the_scale() -> None:
    """The backward through a penalty reaches no output of the graph."""

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).square().sum()

    model, optimizer = trained(Steep())
    skipped = []
    for _ in range(20):
        optimizer.zero_grad()
        x = batch(0)[0].requires_grad_()
        (grad,) = torch.autograd.grad(model(x), x, create_graph=True)
        (grad.square().sum() * 10).backward()
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
    assert skipped[0]
    assert not all(skipped)


# -- as it begins ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_sum_does_not_overflow_at_the_scale_of_a_mean(backend: str) -> None:
    by = "eager" if backend == "eager" else lookup_backend(backend)
    model, _ = trained(backend=by)
    exact = copy.deepcopy(mlp())
    exact.load_state_dict(model.state_dict())
    for factor in (1e-7, 1.0, 1e6, 1e30):
        for each in (model, exact):
            each.zero_grad()
            loss_of_outputs(each, 0, factor).backward()
        for ours, theirs in zip(gradients(model), gradients(exact), strict=True):
            assert (ours - theirs).norm() <= 0.01 * theirs.norm()
    assert scale_of(model) == START
    assert used() < 1


def test_a_retained_graph_begins_each_backward_with_the_scale_in_force() -> None:
    model, _ = trained(Judged())
    loss = loss_of(model, 0, 1e6)
    for number in range(3):
        loss.backward(retain_graph=True)
        assert used() == START / 2**number


def test_a_gradient_to_look_at_is_not_scaled() -> None:
    model, optimizer = trained(Judged())
    loss_of(model, 0).backward()
    optimizer.step()
    x = batch(0)[0].requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    assert used() == 1
    assert finite([grad])
    # Nor does it count: neither towards growth, nor where it overflows by itself.
    tracker = scaling_of(model).loss_scale.growth_tracker
    torch.autograd.grad(model(x).sum() * 1e30, x)
    assert scaling_of(model).loss_scale.growth_tracker == tracker
    assert scale_of(model) == START


def test_an_image_that_an_optimizer_trains_is_scaled() -> None:
    model = mlp().requires_grad_(False)
    image = batch(0)[0].requires_grad_()
    optimizer = torch.optim.SGD([image], 0.1)
    autoamp.convert(model, **FP16)
    for _ in range(2):  # the optimizer is met at its first step
        optimizer.zero_grad()
        (model(image).sum() * 1e-6).backward()
        optimizer.step()
    assert used() > 1


@pytest.mark.parametrize("asks", [False, True])
def test_weights_before_a_frozen_model_have_scaled_gradients(asks: bool) -> None:
    model = mlp().requires_grad_(False)
    autoamp.convert(model, **FP16)
    before = nn.Linear(WIDTH, WIDTH)
    loss = model(before(batch(0)[0])).mean()
    if asks:
        torch.autograd.grad(loss, [before.weight])
    else:
        loss.backward()
    assert used() > 1


def test_an_overflow_that_leaves_is_nan_which_no_clipping_hides() -> None:
    model, optimizer = trained(Judged())
    loss_of(model, 0, 1e6).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    assert any(bool(g.isnan().any()) for g in gradients(model))
    optimizer.step()
    assert optimizer.step_was_skipped


# -- a step past the wrapper -----------------------------------------------------------


def test_a_step_compiled_as_one_graph_is_said_to_have_no_guard(caplog) -> None:
    model = mlp()
    # Torch breaks the graph in its own optimizers.
    optimizer = OldStyle(model.parameters())
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    autoamp.convert(model, optimizer, **FP16)
    loss_of_outputs(model, 0).backward()
    step()
    (said,) = [r.message for r in caplog.records if "fullgraph" in r.message]
    says(said, "OldStyle", option="fullgraph")


@pytest.mark.parametrize("named", [True, False])
def test_a_step_of_the_class_runs_hooks_and_counts_once(named: bool) -> None:
    model = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3)
    step, calls = optimizer.step, []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    autoamp.convert(model, *([optimizer] if named else []), **FP16)
    for number, factor in enumerate((1.0, math.inf, 1.0)):
        optimizer.zero_grad()
        loss_of_outputs(model, number, factor).backward()
        step()
        assert optimizer.step_was_skipped == (factor != 1.0)
    assert len(calls) == 2
    assert autoamp.report(model).loss_scale.skipped_steps == 1
    assert scaling_of(model).ledger.steps == 3


# -- a checkpoint of another scale -----------------------------------------------------

OWN, OTHER = DynamicLossScale, autoamp.StaticLossScale


@pytest.mark.parametrize(
    ("saved", "asked", "goes_on_at", "word"),
    [
        (1024, 2048, 2048.0, "asks for 2048"),
        (1024, "auto", START, "StaticLossScale"),
        ("auto", 512, 512.0, "DynamicLossScale"),
        (OWN(256.0), OWN(64.0, growth_interval=3), 256.0, "growth_interval"),
        (OWN(256.0), OWN(512.0, min_scale=512.0), 512.0, "min_scale"),
        (OWN(256.0), "auto", 256.0, ""),
        (1024, 1024, 1024.0, ""),
    ],
)
def test_what_this_run_asks_for_stays(
    saved: Any, asked: Any, goes_on_at: float, word: str, caplog
) -> None:
    model, optimizer = trained(loss_scale=copy.deepcopy(saved))
    loss_of_outputs(model, 0).backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    again, resumed = trained(loss_scale=copy.deepcopy(asked))
    resumed.load_state_dict(state)
    assert scale_of(again) == goes_on_at
    told = [r.message for r in caplog.records if "checkpoint" in r.message]
    assert len(told) == bool(word)
    if word:
        says(told[0], word)
    loss_of_outputs(again, 1).backward()
    resumed.step()
    assert not resumed.step_was_skipped
