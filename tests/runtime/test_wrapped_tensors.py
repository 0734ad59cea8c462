"""Calls with tensors of a class whose `__torch_function__` Dynamo fails on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.runtime.program import Program
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16, WIDTH, mlp


class Image(Tensor):
    """Hands its attributes on, as the image classes of training libraries do."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        for each in args:
            if isinstance(each, Image) and isinstance(result, Image):
                result.__dict__.update(copy.copy(each.__dict__))
        return result


class Recursing(Tensor):
    """Has no end where it is traced."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return cls.__torch_function__(func, types, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs or {})


def batch() -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", [Image, Recursing])
def test_the_call_runs_as_under_autocast_and_is_told(
    kind: type[Any], trains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = mlp(), batch().as_subclass(kind)
    x.meta = {"path": "a.png"}
    with torch.set_grad_enabled(trains):
        with torch.autocast("cpu", torch.bfloat16):
            wanted = model(x)
        autoamp.convert(model, **{**BF16, "strict": False})
        for _ in range(2):
            found = model(x)
            assert type(found) is kind
            assert torch.equal(found, wanted.float())
            assert found.__dict__ == wanted.__dict__
            if trains:
                found.sum().backward()
                assert all(p.grad is not None for p in model.parameters())
        (line,) = warned(caplog)
        says(line, "torch.autocast", kind.__name__)
        report = autoamp.report(model)
        assert (report.coverage.calls, report.coverage.calls_aside) == (2, 2)
        assert not report.graphs
        model(batch())
    assert autoamp.report(model).coverage.calls_aside == 2, "plain tensors are captured"


@pytest.mark.parametrize("kind", [Image, Recursing])
def test_the_call_raises_under_strict(kind: type[Any]) -> None:
    model: nn.Module = autoamp.convert(mlp(), **{**BF16, "strict": True})
    with pytest.raises(Exception, match=r"Image|RecursionError"):
        model(batch().as_subclass(kind))


def test_a_call_in_which_dynamo_raises_runs_as_under_autocast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = mlp(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(x).float()

    def fails(*_: Any) -> Any:
        raise torch._dynamo.exc.InternalTorchDynamoError("of its own")

    monkeypatch.setattr("autoamp.compat.compiled_forward.CompiledEntry._alone", fails)
    autoamp.convert(model, **{**BF16, "strict": False})
    assert torch.equal(model(x), wanted)
    (line,) = warned(caplog)
    says(line, "torch.autocast", "of its own")
    coverage = autoamp.report(model).coverage
    assert (coverage.calls, coverage.calls_aside) == (1, 1)


def test_a_class_that_dynamo_raises_on_is_left_alone_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = mlp(), batch().as_subclass(Image)
    tried: list[type] = []

    def fails(_: Program, __: nn.Module, given: Tensor) -> Tensor:
        tried.append(type(given))
        raise torch._dynamo.exc.InternalTorchDynamoError("maximum recursion depth")

    monkeypatch.setattr(Program, "__call__", fails)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            wanted = model(x).float()
        autoamp.convert(model, **{**BF16, "strict": False})
        for _ in range(3):
            assert torch.equal(model(x), wanted)
        assert tried == [Image]
        model(batch())
    assert tried == [Image, Tensor], "plain tensors may be captured"
    says(warned(caplog)[0], "torch.autocast", "Image")
