"""A GradScaler of the script's own scales, and autoamp's loss scale steps aside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.metrics import relative_error
from tests.training.steps import (
    BF16,
    FP16,
    HUGE,
    converted,
    loss_of,
    mlp,
    moved,
    weights_of,
)


def loss_scale(model: nn.Module) -> Any:
    return autoamp.report(model).loss_scale


def finite(*tensors: Tensor) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def scaler_script(
    model: nn.Module, clip: bool, enabled: bool = True, **options: Any
) -> Any:
    """As in torch's documentation; gives scales, losses and the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, **options)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=2.0**12,
        growth_interval=3,
        enabled=enabled,
    )
    scales, losses = [], []
    for number in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, number, HUGE if number == 4 else 1.0)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.detach())
    return scales, losses, optimizer


@pytest.mark.parametrize(
    ("clip", "fused", "named"), [(False, False, False), (True, True, True)]
)
def test_grad_scaler_script_is_not_scaled_twice(
    clip: bool, fused: bool, named: bool
) -> None:
    torch.manual_seed(0)
    plain = mlp()
    model = copy.deepcopy(plain)
    converted(model)
    if named:
        other = torch.optim.SGD(model.parameters(), 0.1)
        autoamp.convert(model, other, **BF16)
    theirs = scaler_script(plain, clip, fused=fused)
    ours = scaler_script(model, clip, fused=fused)
    assert ours[0] == theirs[0]
    assert ours[0] != sorted(ours[0])  # one was skipped
    assert relative_error(ours[1][:4], theirs[1][:4]) < 0.05
    for mine, exact in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, exact, atol=0.03)
    assert loss_scale(model).foreign is True
    assert loss_scale(model).skipped_steps == 0
    # The scaler goes, and ours begins where it is.
    optimizer = ours[2]
    for factor in (1.0, HUGE, 1.0):
        optimizer.zero_grad()
        before = weights_of(model)
        loss_of(model, 1, factor).backward()
        optimizer.step()
        skipped = bool(optimizer.step_was_skipped)
        assert moved(before, model) != skipped
        assert not loss_scale(model).foreign
    assert not skipped


def test_disabled_scaler_is_none() -> None:
    torch.manual_seed(0)
    model = converted()
    scales, _, optimizer = scaler_script(model, clip=True, enabled=False)
    assert set(scales) == {1.0}
    assert loss_scale(model).foreign is False
    assert loss_scale(model).skipped_steps == 1
    assert optimizer.step_was_skipped is False
    assert all(torch.isfinite(p).all() for p in model.parameters())


def script_with(model: nn.Module, scaler: Any) -> list[tuple[float, bool]]:
    torch.manual_seed(0)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for number in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number, 1e-3)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), finite(*model.parameters())))
    return seen


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("asked", ["nothing", "optimizer", "dynamic", "number"])
def test_a_scaler_that_is_merely_there_changes_nothing(used: bool, asked: str) -> None:
    bystander = torch.amp.GradScaler("cpu")
    if used:
        bystander.scale(torch.ones(1))
    model = nn.Linear(8, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    if asked == "optimizer":
        autoamp.convert(model, optimizer, **FP16)
    elif asked == "nothing":
        autoamp.convert(model, **FP16)
    else:
        scale: Any = "dynamic" if asked == "dynamic" else 2.0**15
        autoamp.convert(model, loss_scale=scale, **FP16)
    # 1e-8 is nothing in fp16, unless it is scaled.
    (model(torch.ones(1, 8)).sum() * 1e-8).backward()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, torch.tensor(1e-8), rtol=2.0**-10, atol=0)
    assert not loss_scale(model).foreign
    assert bystander.is_enabled()


def test_a_scaler_that_scales_is_left_to_it_from_the_first_backward_on() -> None:
    """Its first scale is the largest that works: ours on top would overflow."""
    options: dict[str, Any] = {"init_scale": 2.0**16, "growth_interval": 100}
    idle = torch.amp.GradScaler("cpu")
    scaler = torch.amp.GradScaler("cpu", **options)
    model = autoamp.convert(nn.Linear(8, 4), **FP16)
    assert script_with(model, scaler) == [(2.0**16, True)] * 3
    assert loss_scale(model).foreign
    assert idle.is_enabled()


def test_a_scaler_that_was_used_before_is_met_at_its_first_update() -> None:
    """One scaler for several models in a row: only the first step is scaled twice."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
    scaler.scale(torch.ones(1))
    model = autoamp.convert(nn.Linear(8, 4), **FP16)
    seen = script_with(model, scaler)
    assert [scale for scale, _ in seen] == [2.0**15] * 3
    assert loss_scale(model).foreign


def test_what_was_asked_for_wins_over_a_scaler_that_has_scaled() -> None:
    scaler = torch.amp.GradScaler("cpu")
    model = autoamp.convert(nn.Linear(8, 4), loss_scale=2.0**10, **FP16)
    loss = scaler.scale(model(torch.ones(1, 8)).sum() * 1e-12)
    loss.backward()
    assert model.weight.grad is not None
    # 2**16 times 1e-12 is half the smallest number of fp16: without ours it is 0.
    expected = torch.tensor(2.0**16 * 1e-12)
    assert torch.allclose(model.weight.grad, expected, rtol=2.0**-9, atol=0)
    assert not loss_scale(model).foreign


def test_runs_in_flight_are_left_to_the_scaler_too() -> None:
    """Two forwards before the first backward."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    model = autoamp.convert(nn.Linear(8, 4), **FP16)
    results = [model(torch.ones(1, 8)).sum() for _ in range(2)]
    for result in results:
        model.zero_grad()
        scaler.scale(result).backward()
        assert finite(model.weight.grad)
        assert model.weight.grad.unique().tolist() == [2.0**14]
