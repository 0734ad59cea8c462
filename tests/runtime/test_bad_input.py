"""What cannot be converted is said clearly, and the model stays as it was."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16, WIDTH, Of, mlp

THINGS: list[Any] = ["resnet50", torch.relu, {"graph": None}, nn.Linear, None]


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: type(thing).__name__)
def test_not_a_module(thing: Any) -> None:
    with pytest.raises(autoamp.UnsupportedModelError) as raised:
        autoamp.convert(thing, **BF16)
    says(raised, "torch.nn.Module")
    assert not autoamp.is_converted(thing)
    for ask in (autoamp.report, autoamp.revert):
        with pytest.raises(autoamp.UnsupportedModelError):
            ask(thing)


def weights() -> nn.Module:
    return nn.ParameterList([torch.ones(2, 2)])


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "scripted": (lambda: torch.jit.script(nn.Linear(2, 2)), ("TorchScript",)),
    "compiled": (
        lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
        ("compiled", "convert the model inside"),
    ),
    "empty": (nn.ModuleList, ("ModuleList", "give it a forward")),
    "container": (lambda: nn.ModuleList([nn.ModuleList()]), ("ModuleList", "forward")),
    "weights": (weights, ("ParameterList", "give it a forward")),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_modules_that_cannot_be_captured(name: str) -> None:
    make, needed = UNSUPPORTED[name]
    model = make()
    contents = dict(model.__dict__)
    with pytest.raises(autoamp.UnsupportedModelError) as raised:
        autoamp.convert(model, **BF16)
    says(raised, *needed)
    assert model.__dict__ == contents
    assert not autoamp.is_converted(model)


# -- models left as they are -----------------------------------------------------------


class Quantised(nn.Linear):
    """Stands for the modules of `torch.ao.nn.quantized`, which need an engine."""


Quantised.__module__ = "torch.ao.nn.quantized.modules.linear"


def of_complex_numbers() -> nn.Module:
    weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
    return Of(lambda m, x: (m.weight * x).abs(), weight=weight)


def quantised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Quantised(WIDTH, 4))


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "bf16": (lambda: mlp().bfloat16(), ("bf16 already",)),
    "fp16": (lambda: mlp().half(), ("fp16 already",)),
    "float64": (lambda: mlp().double(), ("float64", "only fp32")),
    "complex": (of_complex_numbers, ("complex", "only fp32")),
    "quantised": (quantised, ("1 is quantised", "Quantised")),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_as_it_is_with_the_reason_in_the_report(name: str, caplog) -> None:
    make, reason = LEFT_ALONE[name]
    model = make()
    dtype = next(model.parameters()).dtype.to_real()
    x = torch.randn(3, WIDTH, dtype=dtype)
    contents, exact = dict(model.__dict__), model(x)
    assert autoamp.convert(model, **BF16) is model
    assert model.__dict__ == contents
    assert torch.equal(model(x), exact)
    assert not autoamp.is_converted(model)
    report = autoamp.report(model)
    ((what, why),) = [(s[0], s[1]) for s in report.skipped]
    assert what == type(model).__name__
    says(why, *reason)
    assert report.runs == 0
    (warning,) = warned(caplog)
    says(warning, why)
    copy.deepcopy(model)
    autoamp.revert(model)
    with pytest.raises(autoamp.UnsupportedModelError):
        autoamp.report(model)


@pytest.mark.usefixtures("no_units")
def test_precision_that_cannot_pay_here_is_declined(caplog) -> None:
    """So is a second conversion, which leaves an fp32 model."""
    model, x = mlp(), torch.randn(3, WIDTH)
    contents, exact = dict(model.__dict__), model(x)
    for _ in range(2):
        autoamp.convert(model, precision="fp16")
        assert model.__dict__ == contents
        assert torch.equal(model(x), exact)
        ((_, why),) = [(s[0], s[1]) for s in autoamp.report(model).skipped]
        says(why, "fp16", option="do_no_harm=False")
        says(warned(caplog)[0], why)
        autoamp.convert(model, **BF16)
        assert autoamp.report(model).skipped == []


@pytest.mark.parametrize("model", [Of(lambda m, x: x * 2 + 1), nn.Identity()])
def test_a_module_without_float_ops(model: nn.Module) -> None:
    x = torch.arange(4)
    expected = model(x)
    autoamp.convert(model, strict=True, **BF16)
    assert torch.equal(model(x), expected)
    ((_, why),) = [(s[0], s[1]) for s in autoamp.report(model).skipped]
    assert why == "it has no float op"


def test_a_model_of_which_no_op_is_low_is_not_called_converted(caplog) -> None:
    caplog.set_level(logging.INFO, "autoamp")
    model = autoamp.convert(mlp(), deny=["linear", "relu"], **BF16)
    model(torch.randn(3, WIDTH))
    said = [record.getMessage() for record in caplog.records]
    says(said, "stays in fp32")
    assert not any("is converted" in each for each in said)


# -- the pass itself fails -------------------------------------------------------------


@pytest.fixture
def failing_pass(monkeypatch) -> None:
    """A fault of ours, wherever: in the first thing that the pass does here."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("the bridge is out")

    monkeypatch.setattr("autoamp.passes.run.normalise", fail)


@pytest.mark.usefixtures("failing_pass")
def test_model_runs_on_in_fp32_where_the_pass_fails(caplog) -> None:
    model, x = mlp(), torch.randn(3, WIDTH)
    exact = model(x)
    autoamp.convert(model, **BF16)
    for _ in range(3):
        assert torch.equal(model(x), exact)
    (warning,) = warned(caplog)
    says(warning, "runs in fp32")
    report = autoamp.report(model)
    ((what, why),) = [(s[0], s[1]) for s in report.skipped]
    assert (what, why) == ("graph 0", "ArithmeticError: the bridge is out")
    assert report.runs == 0


@pytest.mark.usefixtures("failing_pass")
def test_strict_raises_where_the_pass_fails() -> None:
    model, x = mlp(), torch.randn(3, WIDTH)
    contents = dict(model.__dict__)
    with pytest.raises(autoamp.AutoampError):
        autoamp.convert(model, strict=True, example_inputs=(x,), **BF16)
    assert model.__dict__ == contents
    autoamp.convert(model, strict=True, **BF16)
    for _ in range(2):
        with pytest.raises(autoamp.AutoampError) as raised:
            model(x)
        assert isinstance(raised.value.__cause__, ArithmeticError)
        says(raised, "the bridge is out", "Sequential")
    autoamp.revert(model)
    model(x)


@pytest.mark.usefixtures("failing_pass")
def test_an_error_that_dynamo_swallows_is_not_raised_for_another_call() -> None:
    model, x = mlp(), torch.randn(3, WIDTH)
    autoamp.convert(model, strict=True, **BF16)
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        pytest.raises(autoamp.AutoampError),
    ):
        model(x)
    with pytest.raises(RuntimeError) as raised:
        model(torch.randn(3, WIDTH + 1))
    assert not isinstance(raised.value, autoamp.AutoampError)
