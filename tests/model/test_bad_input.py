"""What cannot be converted is said clearly, and the model stays as it was."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.pipeline import run
from tests.logs import warned
from tests.small_models import BF16, WIDTH, Of, mlp

# -- not a model -------------------------------------------------------------------

THINGS: dict[str, Any] = {
    "resnet50": "str",
    "function": torch.relu,
    "dict": {"graph": None},
    "class": nn.Linear,
    "tensor": torch.zeros(2),
    "nothing": None,
}


@pytest.mark.parametrize("name", THINGS)
def test_not_a_module(name: str) -> None:
    with pytest.raises(
        autoamp.UnsupportedModelError, match=r"takes a torch\.nn\.Module, not"
    ):
        autoamp.convert(THINGS[name], **BF16)
    assert not autoamp.is_converted(THINGS[name])
    with pytest.raises(autoamp.UnsupportedModelError, match="not converted"):
        autoamp.report(THINGS[name])
    with pytest.raises(autoamp.UnsupportedModelError, match=r"revert\(\) takes"):
        autoamp.revert(THINGS[name])


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "on meta": (
        lambda: nn.Linear(2, 2, device="meta"),
        r"weight of Linear is on the meta device.*load the weights first",
    ),
    "partly on meta": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
        r"1\.weight of Sequential is on the meta device",
    ),
    "scripted": (
        lambda: torch.jit.script(nn.Linear(2, 2)),
        r"TorchScript module; convert the model it was made from",
    ),
    "compiled": (
        lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
        r"already compiled; convert the model inside it",
    ),
    "container": (
        lambda: nn.ModuleList([nn.Linear(2, 2)]),
        r"ModuleList has no forward; convert the module that calls",
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_modules_that_cannot_be_captured(name: str) -> None:
    make, message = UNSUPPORTED[name]
    model = make()
    contents = dict(model.__dict__)
    with pytest.raises(autoamp.UnsupportedModelError, match=message):
        autoamp.convert(model, **BF16)
    assert model.__dict__ == contents
    assert not autoamp.is_converted(model)


# -- models left as they are -------------------------------------------------------


class Quantised(nn.Linear):
    """Stands for the modules of `torch.ao.nn.quantized`, which need an engine."""


Quantised.__module__ = "torch.ao.nn.quantized.modules.linear"


def of_complex_numbers() -> nn.Module:
    weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
    return Of(lambda m, x: (m.weight * x).abs(), weight=weight)


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bf16": (lambda: mlp().bfloat16(), "its parameters are bf16 already"),
    "fp16": (lambda: mlp().half(), "its parameters are fp16 already"),
    "float64": (lambda: mlp().double(), "float64; only fp32 is ever lowered"),
    "complex": (of_complex_numbers, "its parameters are complex; only fp32"),
    "quantised": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Quantised(WIDTH, 4)),
        r"1 is quantised \(Quantised\)",
    ),
}


def dtype_of(model: nn.Module) -> torch.dtype:
    dtype = next(model.parameters()).dtype
    return torch.float32 if dtype.is_complex else dtype


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_as_it_is_with_the_reason_in_the_report(name: str, caplog) -> None:
    make, reason = LEFT_ALONE[name]
    model = make()
    x = torch.randn(3, WIDTH, dtype=dtype_of(model))
    contents, exact = dict(model.__dict__), model(x)
    assert autoamp.convert(model, **BF16) is model
    assert model.__dict__ == contents
    assert torch.equal(model(x), exact)
    assert not autoamp.is_converted(model)
    report = autoamp.report(model)
    ((what, why),) = [(s[0], s[1]) for s in report.skipped]
    assert what == type(model).__name__
    assert re.search(reason, why)
    assert report.runs == 0
    (warning,) = warned(caplog)
    assert why in warning
    assert "fp32:" not in warning
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
        assert "fp16 cannot pay here" in why
        assert "do_no_harm=False" in why
        assert why in warned(caplog)[0]
        autoamp.convert(model, **BF16)
        assert autoamp.report(model).skipped == []


INTEGERS = Of(lambda m, x: x * 2 + 1)


@pytest.mark.parametrize("model", [INTEGERS, nn.Identity()])
def test_a_module_without_float_ops(model: nn.Module) -> None:
    x = torch.arange(4)
    expected = model(x)
    autoamp.convert(model, strict=True, **BF16)
    assert torch.equal(model(x), expected)
    ((_, why),) = [(s[0], s[1]) for s in autoamp.report(model).skipped]
    assert why == "it has no float op"


# -- options -----------------------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "precision": ({"precision": "fp8"}, "precision='fp8' is not.*'fp16', 'bf16'"),
    "precision dtype": ({"precision": torch.float64}, "precision=torch.float64"),
    "placement": ({"placement": "best"}, "placement='best' is unknown.*'optimal'"),
    "objective": ({"objective": "speed"}, "objective='speed' is unknown.*'memory'"),
    "backend": ({"backend": "tvm"}, "backend='tvm' is unknown.*'inductor'"),
    "loss scale": ({"loss_scale": "big"}, "loss_scale='big' is unknown.*'dynamic'"),
    "scale 0": ({"loss_scale": 0}, "loss_scale=0 is not a positive finite number"),
    "scale below": ({"loss_scale": -2.0}, "loss_scale=-2.0 is not a positive finite"),
    "scale inf": ({"loss_scale": float("inf")}, "loss_scale=inf is not a positive"),
    "scale nan": ({"loss_scale": float("nan")}, "loss_scale=nan is not a positive"),
    "do no harm": ({"do_no_harm": "no"}, "do_no_harm='no' is not True or False"),
    "strict": ({"strict": 1}, "strict=1 is not True or False"),
    "lists": ({"allow": 3}, "allow=3 is not a list of names"),
    "list of": ({"keep": [nn.Linear]}, "keep holds .* not a name"),
    "op": (
        {"deny": ["matmull"]},
        "deny=matmull: torch has no op.*did you mean.*matmul",
    ),
    "two lists": (
        {"allow": ["exp"], "deny": ["exp"]},
        "exp is in two lists, allow= and deny=; take it out of one",
    ),
    "missing": ({"rules": "/nowhere/my.toml"}, "/nowhere/my.toml: cannot be read"),
    "no such set": ({"rules": "fp61"}, "fp61: neither a file nor a built-in set"),
    "optimizer": ({"optimizer": "adam"}, "optimizer=str is not a torch.optim"),
    "optimizers": ({"optimizer": [1]}, "optimizer=int is not a torch.optim"),
    "examples": ({"example_inputs": torch.ones(2)}, "example_inputs must be a tuple"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_options(name: str) -> None:
    options, message = OPTIONS[name]
    model = mlp()
    for converted in (False, True):
        contents = dict(model.__dict__)
        with pytest.raises(autoamp.AutoampError, match=message):
            autoamp.convert(model, **{**BF16, **options})
        assert model.__dict__ == contents
        assert autoamp.is_converted(model) is converted
        autoamp.convert(model, **BF16)


def test_option_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="precison"):
        autoamp.convert(mlp(), precison="bf16")


def test_bad_rules_file(tmp_path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[deny]\nexpp = 'x'\n")
    model = mlp()
    contents = dict(model.__dict__)
    message = r"my\.toml.*torch has no op .*expp; did you mean"
    with pytest.raises(autoamp.RulesError, match=message):
        autoamp.convert(model, rules=str(path), **BF16)
    assert model.__dict__ == contents


def test_rules_without_the_built_in_ones_are_refused(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[deny]\ngelu = 'large'\n[allow]\ncos = 'small'\n")
    mine, model = autoamp.Rules.load(path), mlp()
    contents = dict(model.__dict__)
    with pytest.raises(autoamp.OptionError, match=r"without the built-in.*merge"):
        autoamp.convert(model, rules=mine, **BF16)
    assert model.__dict__ == contents
    x = torch.randn(2, WIDTH)
    laid = autoamp.Rules.default("bf16").merge(mine)
    options = {**BF16, "allow": ["linear"], "rules": mine}
    for given in ({**BF16, "rules": laid}, options):
        ops = autoamp.explain(model, x, options=given).ops
        assert all(op.is_low for op in ops if op.op.startswith("aten::linear"))


# -- the pass itself fails ---------------------------------------------------------


@pytest.fixture
def failing_pass(monkeypatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("the bridge is out")

    monkeypatch.setattr(run, "normalise", fail)


@pytest.mark.usefixtures("failing_pass")
def test_model_runs_on_in_fp32_where_the_pass_fails(caplog) -> None:
    model, x = mlp(), torch.randn(3, WIDTH)
    exact = model(x)
    autoamp.convert(model, **BF16)
    for _ in range(3):
        assert torch.equal(model(x), exact)
    (warning,) = warned(caplog)
    assert "runs in fp32" in warning
    report = autoamp.report(model)
    ((what, why),) = [(s[0], s[1]) for s in report.skipped]
    assert (what, why) == ("graph 0", "ArithmeticError: the bridge is out")
    assert report.runs == 0


@pytest.mark.usefixtures("failing_pass")
def test_strict_raises_where_the_pass_fails() -> None:
    model, x = mlp(), torch.randn(3, WIDTH)
    contents = dict(model.__dict__)
    with pytest.raises(autoamp.AutoampError, match="the bridge is out"):
        autoamp.convert(model, strict=True, example_inputs=(x,), **BF16)
    assert model.__dict__ == contents
    autoamp.convert(model, strict=True, **BF16)
    for _ in range(2):
        with pytest.raises(autoamp.AutoampError, match="the bridge is out") as caught:
            model(x)
        assert isinstance(caught.value.__cause__, ArithmeticError)
    assert "Sequential" in str(caught.value)
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
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(torch.randn(3, WIDTH + 1))
    assert not isinstance(caught.value, autoamp.AutoampError)


def test_errors_of_the_model_are_its_own() -> None:
    model = autoamp.convert(mlp(), **BF16)
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(3, WIDTH + 1))
    assert not isinstance(caught.value, autoamp.AutoampError)
    model(torch.randn(3, WIDTH))
    assert autoamp.report(model).runs == 1


def test_a_model_of_which_no_op_is_low_is_not_called_converted(caplog) -> None:
    caplog.set_level(logging.INFO, "autoamp")
    model = autoamp.convert(mlp(), deny=["linear", "relu"], **BF16)
    model(torch.randn(3, WIDTH))
    assert "is converted" not in caplog.text
    assert "stays in fp32: none of its" in caplog.text
