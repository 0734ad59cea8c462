"""Under the script's own autocast one line says why autoamp stands aside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp import messages
from autoamp.auto import mode

X = torch.randn(4, 16)
REGION = {"device_type": "cpu", "dtype": torch.bfloat16}


class Net(nn.Module):
    """A model whose label no other test has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())

    def encode(self, x: Tensor) -> Tensor:
        return self.a(x)


class Inside(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(**REGION):
            return super().forward(x)


@pytest.fixture(autouse=True)
def automatic(monkeypatch, caplog) -> Iterator[None]:
    monkeypatch.setattr(messages, "_logged", {})
    mode._seen.clear()
    caplog.set_level(logging.INFO, "autoamp")
    autoamp.enable(precision="bf16", do_no_harm=False)
    yield
    autoamp.disable()


def said(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]


def in_a_region(model: Net) -> Tensor:
    with torch.autocast(**REGION):
        return model(X)


def by_a_method(model: Net) -> Tensor:
    with torch.autocast(**REGION):
        return model.encode(X)


def wrapped(model: Net) -> Tensor:
    """As Accelerate does, where Dynamo cannot go on inside the wrapper."""
    if "forward" not in vars(model):
        inner = model.forward

        def forward(x: Tensor) -> Tensor:
            with torch.autocast(**REGION):
                torch._dynamo.graph_break()
                return inner(x)

        model.forward = forward  # type: ignore[method-assign]
    return model(X)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (Net, in_a_region),
        (Net, by_a_method),
        (Net, wrapped),
        (Inside, lambda model: model(X)),
    ],
)
def test_one_line_says_that_the_model_is_left_to_autocast(
    kind: type[Net], call: Callable[[Net], Tensor], caplog
) -> None:
    model = kind()
    for _ in range(3):
        call(model)
    (line,) = said(caplog)
    assert f"{kind.__name__} is left to the script's own autocast" in line


def test_a_converted_model_in_a_region_is_said_to_be_left(caplog) -> None:
    model = Net()
    model(X)
    before = len(said(caplog))
    for _ in range(3):
        in_a_region(model)
    (line,) = said(caplog)[before:]
    assert "Net is left to the script's own autocast" in line


def test_a_compiled_function_in_a_region_is_said_to_be_left(caplog) -> None:
    a, b = torch.randn(16, 16), torch.randn(16, 16)

    @torch.compile(backend="eager")
    def product(x: Tensor) -> Tensor:
        return x @ a @ b

    with torch.autocast(**REGION):
        product(X)
    (line,) = said(caplog)
    assert "product() is left to the script's own autocast" in line


def test_nothing_is_said_of_losses_and_lone_layers(caplog) -> None:
    with torch.autocast(**REGION):
        nn.Linear(16, 16)(X)
        nn.MSELoss()(X, X)
    assert said(caplog) == []
