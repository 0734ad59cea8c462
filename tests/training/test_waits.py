"""Nothing waits for a device: no forward, no backward, and no fused optimizer's step.

On a CPU flags are read at once; here that is forbidden, so that the other way is taken,
as on a GPU, where each value that the host asks for is a wait.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autoamp
from autoamp import compat
from autoamp.training.ledger import GraphRun, _move
from tests.fake_cuda import SKIPPED
from tests.quick import each_pair
from tests.training.steps import as_on_a_gpu, batch, mlp, scaling_of

STEPS, BAD = 8, 4


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)


@contextlib.contextmanager
def counting(*, captures: bool = False) -> Iterator[list[int]]:
    """How many values the host asks for, those in C++ too; filled at the end.

    Args:
        captures: whether a model may be captured, which asks where tensors are.
    """
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        # A backward reads a flag in the host's memory at once, and no other flag.
        if not captures:
            patch.setattr(torch.Tensor, "is_cpu", False)
        with torch.autograd.profiler.profile() as profile:
            yield found
    events: Any = profile.function_events
    found.append(sum(each.name == "aten::_local_scalar_dense" for each in events))


class OwnLoss(nn.Module):
    """A model that gives its own loss: one number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(x), y)


def values_asked(model: nn.Module, *, own_loss: bool, parts: int) -> list[list[int]]:
    """How many values each forward, backward and step asks for."""
    # Adam's fused kernel for CPUs asks for its own counters.
    sgd: Any = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
    asked = []
    for step in range(STEPS):
        of_step = []
        for part in range(parts):
            x, y = batch(step * parts + part)
            factor = math.inf if (step, part) == (BAD, 0) else 1.0
            with counting(captures=True) as forward:
                loss = model(x, y) if own_loss else nn.functional.mse_loss(model(x), y)
                loss = loss * factor
            with counting() as backward:
                loss.backward()
            of_step += [*forward, *backward]
        with counting() as stepped:
            sgd.step()
        of_step += stepped
        sgd.zero_grad()
        if hasattr(sgd, "step_was_skipped"):  # with autoamp
            assert bool(sgd.step_was_skipped) == (step == BAD)
        asked.append(of_step)
    return asked


@pytest.mark.parametrize(
    ("precision", "own_loss", "parts"),
    each_pair(["fp16", "bf16"], [False, True], [1, 2]),
)
@pytest.mark.usefixtures("as_on_gpu")
def test_a_step_asks_for_no_value_more_than_without_autoamp(
    precision: str, own_loss: bool, parts: int
) -> None:
    """CI has each pair of a precision, a loss and a number of backwards."""
    plain = values_asked(
        OwnLoss() if own_loss else mlp(), own_loss=own_loss, parts=parts
    )
    model = OwnLoss() if own_loss else mlp()
    autoamp.convert(model, precision=precision, do_no_harm=False)
    ours = values_asked(model, own_loss=own_loss, parts=parts)
    # The first call captures, and the first step waits: it may have to make state.
    assert ours[1:] == plain[1:]
    report = autoamp.report(model)
    assert report.coverage.share_of_flops == 1
    assert report.loss_scale is not None
    assert report.loss_scale.skipped_steps == 1


def probe(model: nn.Module) -> int:
    """The values asked for by a backward to an image, which fills no weight."""
    x = batch(0)[0].requires_grad_()
    y = model(x).sum()
    with counting() as asked:
        torch.autograd.grad(y, x)
    return asked[0]


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_probe_asks_for_no_value(precision: str) -> None:
    model = autoamp.convert(mlp(), precision=precision, do_no_harm=False)
    probe(model)
    assert probe(model) == 0


@SKIPPED
@pytest.mark.parametrize("climbs", [False, True])
def test_a_backward_on_a_gpu_asks_for_no_value(climbs: bool) -> None:
    """A fake tensor of a GPU has no value: whatever asks for one raises."""
    scale = autoamp.DynamicLossScale(growth_interval=2, climbs=climbs)
    model = autoamp.convert(mlp(), precision="fp16", loss_scale=scale, do_no_harm=False)
    scaling, gpu, nothing = scaling_of(model), torch.device("cuda"), Any
    with FakeTensorMode(allow_non_fake_inputs=True):
        for shape in ((), (6, 4), (400, 400)) * 4:
            run = GraphRun(scaling, nothing, nothing, [gpu])
            run.magnitudes = [torch.ones((), device=gpu)] if climbs else None
            grad = torch.ones(shape, device=gpu)
            for _ in range(2):
                run.begin(grad, None if shape else grad, trains=True)
                compat.any_not_finite([grad])
                _move(scaling, [run], counts=True)
        assert scale.current.device == torch.device("cuda", 0)
