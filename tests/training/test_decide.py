"""What becomes of a step: the flag, what the optimizer can do, whether it retries."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from autoamp.training.ranks import ALONE
from autoamp.training.scale import resolve_loss_scale
from autoamp.training.step import decide as deciding
from autoamp.training.step import kernel_flag
from autoamp.training.step.boundary import OptimizerBoundary
from autoamp.training.step.decide import (
    Way,
    decide,
    decide_begun,
    decide_evaluation,
)
from autoamp.training.step.read import Evidence, Reading
from tests.training.steps import HUGE, converted, loss_of, name

CLEAN, OVERFLOW = 0.0, 1.0
DYNAMIC, STATIC = "dynamic", 8.0


@pytest.fixture(autouse=True)
def a_flag_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: only such a flag is left to a kernel."""
    monkeypatch.setattr(kernel_flag, "free_to_read", lambda _: False)


class Scaled:
    """The scaling of a model, as far as a decision asks about it."""

    enabled = True

    def __init__(self, loss_scale: str | float) -> None:
        self.domain: Any = self
        self.loss_scale = resolve_loss_scale(loss_scale, torch.float16)


def boundary_of(kind: str, loss_scale: str | float) -> OptimizerBoundary:
    weight = nn.Parameter(torch.ones(2))
    if kind == "LBFGS":
        optimizer: Any = torch.optim.LBFGS([weight])
    else:
        optimizer = torch.optim.Adam([weight], fused=kind.startswith("fused"))
    weight.grad = torch.ones(2)
    if kind == "fused":  # with state, as its kernel needs
        optimizer.step()
    boundary = OptimizerBoundary(optimizer)
    scaled: Any = Scaled(loss_scale)
    boundary.scalings.append(scaled)
    return boundary


def reading_of(flag: float, elsewhere: Any = ()) -> Reading:
    evidence = Evidence([], [], elsewhere, 0)
    return Reading([], evidence, [], ALONE, True, torch.tensor([flag]), {})


STEP = Way.STEP, False, "no gradient overflows"
SKIP = Way.SKIP, True, "gradients overflow"
RETRY = Way.RETRY, True, "gradients overflow, and a lower loss scale may cure that"
BY_KERNEL = Way.BY_KERNEL, None, "the optimizer's kernel decides"


@pytest.mark.parametrize(
    ("function", "kind", "loss_scale", "clean", "overflow"),
    [
        ("step", "plain", DYNAMIC, STEP, SKIP),
        ("step", "fused", DYNAMIC, BY_KERNEL, BY_KERNEL),
        ("step", "fused", STATIC, BY_KERNEL, BY_KERNEL),
        ("step", "fused without state", DYNAMIC, STEP, SKIP),
        ("step", "LBFGS", DYNAMIC, STEP, SKIP),
        ("begun", "fused", DYNAMIC, STEP, SKIP),
        ("evaluation", "plain", DYNAMIC, STEP, SKIP),
        ("evaluation", "fused", DYNAMIC, STEP, SKIP),
        ("evaluation", "LBFGS", DYNAMIC, STEP, RETRY),
        ("evaluation", "LBFGS", STATIC, STEP, SKIP),
        ("evaluation", "LBFGS", "off", STEP, SKIP),
    ],
)
def test_decisions(
    function: str, kind: str, loss_scale: Any, clean: Any, overflow: Any
) -> None:
    for flag, expected in ((CLEAN, clean), (OVERFLOW, overflow)):
        boundary, reading = boundary_of(kind, loss_scale), reading_of(flag)
        if function == "begun":
            found = decide_begun(reading)
        elif function == "evaluation":
            found = decide_evaluation(boundary, reading)
        else:
            found = decide(boundary, reading)
        assert (found.way, found.overflow, found.reason) == expected
        assert found.flag is (reading.flag if found.way is Way.BY_KERNEL else None)


@pytest.mark.parametrize("flag", [CLEAN, OVERFLOW])
def test_the_host_looks_at_a_kernels_flag_now_and_then(
    flag: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    boundary = boundary_of("fused", DYNAMIC)
    for boundary.steps in range(1, 250):
        looked = decide(boundary, reading_of(flag)).overflow
        expected = bool(flag) if boundary.steps in (99, 199) else None
        assert looked is expected
    # Runs of other optimizers may have passed the overflow on, and a loss scale of
    # theirs moves only where the host knows.
    assert decide(boundary, reading_of(flag, [object()])).overflow is bool(flag)
    monkeypatch.setattr(deciding.compat, "is_capturing", lambda _: True)
    assert decide(boundary, reading_of(flag, [object()])).overflow is None


@pytest.mark.one_model
def test_the_log_tells_why(caplog: pytest.LogCaptureFixture) -> None:
    model = converted()
    optimizer = name(torch.optim.SGD(model.parameters(), 0.1), model)
    logger = "autoamp.training.step.boundary"
    with caplog.at_level(logging.DEBUG, logger):
        for factor in (1.0, HUGE):
            loss_of(model, 0, factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [r.getMessage() for r in caplog.records if r.name == logger]
    assert told == [
        "autoamp: step 0 of SGD: no gradient overflows",
        "autoamp: step 1 of SGD: gradients overflow",
    ]
