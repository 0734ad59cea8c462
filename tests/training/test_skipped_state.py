"""A skipped step leaves the buffers, too, that its forwards have written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.training.buffers import HOLDING, Buffers
from tests.small_models import WIDTH, Of
from tests.training.steps import FP16, scaling_of

GUARDED: dict[str, Any] = {"precision": "bf16", "do_no_harm": False, "strict": True}


def _average(m: Any, x: Tensor) -> Tensor:
    x = m.fc(x)
    with torch.no_grad():
        m.mean.mul_(0.9).add_(x.mean(0).float(), alpha=0.1)
        m.count += 1
    return x - m.mean


def _codebook(m: Any, x: Tensor) -> Tensor:
    x = m.fc(x)
    nearest = m.book[torch.cdist(x.float(), m.book).argmin(1)]
    with torch.no_grad():
        m.book.copy_(0.9 * m.book + 0.1 * x.float().mean(0))
    return x + (nearest - x).detach()


def _region(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda given: m.norm(m.fc(given)), x, use_reentrant=False)


def _with(function: Callable[..., Tensor], **parts: Any) -> nn.Module:
    return Of(function, fc=nn.Linear(WIDTH, WIDTH), **parts)


def _norm(**options: Any) -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH, **options)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": _norm,
    "batch norm, cumulative": lambda: _norm(momentum=None),
    "average": lambda: _with(
        _average, mean=torch.zeros(WIDTH), count=torch.tensor(0, dtype=torch.long)
    ),
    "codebook": lambda: _with(_codebook, book=torch.randn(5, WIDTH)),
    "region": lambda: _with(_region, norm=nn.BatchNorm1d(WIDTH)),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH))),
}


def _made(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    return autoamp.convert(model, optimizer, **options)


def _state(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def _changed(model: nn.Module, before: list[Tensor]) -> bool:
    return not all(map(torch.equal, _state(model), before))


def _step(model: nn.Module, optimizer: Any, *bad: bool) -> bool:
    """Takes a step over a batch for each of `bad`; whether the step was skipped."""
    optimizer.zero_grad()
    for is_bad in bad:
        x = torch.randn(6, WIDTH)
        model(x * torch.nan if is_bad else x).square().mean().backward()
    optimizer.step()
    return bool(optimizer.step_was_skipped)


def _holds_nothing(model: nn.Module) -> bool:
    return scaling_of(model).ledger.buffers not in HOLDING


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [FP16, GUARDED], ids=["fp16", "guard"])
def test_a_skipped_step_leaves_all_state(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, optimizer = _made(MODELS[name](), **options)
    for bad in (False, True, True, False):
        before = _state(model)
        assert _step(model, optimizer, bad) == bad
        assert _changed(model, before) != bad
    assert _holds_nothing(model)


def test_the_statistics_of_a_critic_are_undone_with_the_generators_step() -> None:
    scale = autoamp.DynamicLossScale(8.0)
    maker, of_maker = _made(_norm(), **FP16, loss_scale=scale)
    critic, of_critic = _made(_norm(), **FP16, loss_scale=autoamp.DynamicLossScale(8.0))

    def step(bad: bool) -> bool:
        of_maker.zero_grad()
        made = maker(torch.randn(6, WIDTH))
        critic(made * torch.nan if bad else made).mean().backward()
        of_maker.step()
        return bool(of_maker.step_was_skipped)

    assert not step(bad=False)
    before = _state(critic), _state(maker)
    assert step(bad=True)
    assert not _changed(critic, before[0])
    assert not _changed(maker, before[1])
    assert _holds_nothing(critic)
    assert _holds_nothing(maker)
    assert not _step(critic, of_critic, False)


@pytest.mark.parametrize("skipped", [False, True])
def test_a_flag_that_only_a_device_knows(skipped: bool) -> None:
    buffers, values = Buffers(), [torch.ones(3), torch.ones(2, dtype=torch.long)]
    buffers.keep(values)
    for value in values:
        value.add_(1)
    buffers.note(values)
    buffers.put_back(torch.full((1,), float(skipped)))
    assert all(bool((value == 2 - skipped).all()) for value in values)
    assert [value.dtype for value in values] == [torch.float32, torch.long]


def test_a_closure_is_evaluated_again_from_the_statistics_before() -> None:
    model = _norm()
    optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=1)
    autoamp.convert(model, optimizer, **FP16)
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(6, WIDTH) + torch.eye(6, WIDTH)).square().mean()
        loss = loss * (1e38 if len(calls) == 1 else 1.0)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(calls) == 2
    assert int(model[1].num_batches_tracked) == 1
