"""A model of which nothing runs low gets its own call path back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoamp
from autoamp.dtypes import Precision
from autoamp.runtime.eligible import choose_device_precision
from autoamp.training.options import Options

WIDTH = 64


def layer() -> nn.Module:
    """All of it stays fp32 for a few rows: a cast costs more than the product gains."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def low_ops(model: nn.Module) -> int:
    report = autoamp.report(model)
    return sum(op.precision != "fp32" for op in report.ops)


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("training", [True, False])
def test_calls_are_the_models_own_from_the_second_on(training: bool) -> None:
    model, x = layer().train(training), torch.randn(2, WIDTH)
    exact = model(x)
    autoamp.convert(model, precision="bf16", deny=["linear"])
    for _ in range(5):
        assert torch.equal(model(x), exact)
    report = autoamp.report(model)
    assert report.runs == 1
    assert (report.coverage.calls, report.coverage.calls_aside) == (5, 0)
    assert low_ops(model) == 0


@pytest.mark.usefixtures("bf16_units")
def test_larger_calls_are_captured_again() -> None:
    model = layer().eval()
    autoamp.convert(model, precision="bf16")
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(1, WIDTH))
        assert low_ops(model) == 0
        for _ in range(4):
            model(torch.randn(4096, WIDTH))
    report = autoamp.report(model)
    assert low_ops(model) > 0
    assert report.runs >= 4


def test_a_model_with_low_ops_or_in_fp16_does_not_rest() -> None:
    """In fp16 none of its ops is changed, but its gradients are scaled."""
    low = autoamp.convert(layer(), precision="bf16", do_no_harm=False)
    half = layer().half()
    autoamp.convert(half, torch.optim.SGD(half.parameters(), 0.1))
    for _ in range(3):
        low(torch.randn(8, WIDTH))
        half(torch.randn(8, WIDTH).half()).float().sum().backward()
    assert autoamp.report(low).runs == autoamp.report(half).runs == 3


@pytest.mark.parametrize(
    ("device", "precision", "says_what", "units"),
    [
        ("cpu:amx", "fp16", "has no fp16 units", "Use precision='bf16'"),
        ("cpu:plain", "fp16", "CPU without fp16 units", ""),
        ("cpu:plain", "bf16", "CPU without bf16 units", ""),
        (
            "cuda:sm_75",
            "bf16",
            "has no bf16 units",
            "Use precision='fp16'",
        ),
    ],
)
def test_a_precision_without_units_names_the_one_that_has_some(
    device: str, precision: Precision, says_what: str, units: str
) -> None:
    low, why = choose_device_precision(device, Options(precision=precision))
    assert low is None
    assert says_what in why
    assert units in why
    assert "do_no_harm=False" in why
    assert ("which pays here" in why) == bool(units)
