"""Regions without gradients begin where they are entered, graph breaks or not."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.small_models import BF16


class Frozen(nn.Module):
    """Has a frozen part and a trained part, and breaks graphs between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, 8)


class EnteredLater(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        region = torch.no_grad()
        torch._dynamo.graph_break()
        y = self.head(x)
        with region:
            z = self.frozen(x)
        return y * z


class NeverEntered(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        region = contextlib.nullcontext() if self.training else torch.no_grad()
        other = torch.no_grad()
        torch._dynamo.graph_break()
        with region:
            y = self.head(x)
        return y * self.frozen(x) + (other is None)


class Decorates(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        def make(module: nn.Module) -> Any:
            torch._dynamo.graph_break()
            return module

        frozen = torch.no_grad()(make(self.frozen).forward)
        return self.head(x) * frozen(x)


class Enables(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            region = torch.enable_grad()
            torch._dynamo.graph_break()
            z = self.frozen(x)
            with region:
                return self.head(x) * z


class BreaksInside(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = self.frozen(x)
            torch._dynamo.graph_break()
            z = z + self.frozen(x)
        return self.head(x) * z


class Sets(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(False):
            torch._dynamo.graph_break()
            z = self.frozen(x)
        torch._dynamo.graph_break()
        return self.head(x) * z


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)


@pytest.mark.thorough(but=["NeverEntered"])
@pytest.mark.parametrize(
    "kind", [EnteredLater, NeverEntered, Decorates, Enables, BreaksInside, Sets]
)
def test_gradients_are_those_of_the_model(kind: type[Frozen]) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    autoamp.convert(model, **BF16)
    x = torch.randn(4, 8)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            y = each(x)
            assert torch.is_grad_enabled()
            y.square().mean().backward()
        for found, true in zip(model.parameters(), plain.parameters(), strict=True):
            assert (found.grad is None) == (true.grad is None)
            if found.grad is not None and true.grad is not None:
                torch.testing.assert_close(found.grad, true.grad, rtol=0.1, atol=0.02)
