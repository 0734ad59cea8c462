"""Regions without gradients begin where they are entered, graph breaks or not."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.small_models import BF16, Of


def entered_later(m: Any, x: Tensor) -> Tensor:
    region = torch.no_grad()
    torch._dynamo.graph_break()
    y = m.head(x)
    with region:
        z = m.frozen(x)
    return y * z


def never_entered(m: Any, x: Tensor) -> Tensor:
    region = contextlib.nullcontext() if m.training else torch.no_grad()
    other = torch.no_grad()
    torch._dynamo.graph_break()
    with region:
        y = m.head(x)
    return y * m.frozen(x) + (other is None)


def decorates(m: Any, x: Tensor) -> Tensor:
    def make(module: nn.Module) -> Any:
        torch._dynamo.graph_break()
        return module

    frozen = torch.no_grad()(make(m.frozen).forward)
    return m.head(x) * frozen(x)


def enables(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        region = torch.enable_grad()
        torch._dynamo.graph_break()
        z = m.frozen(x)
        with region:
            return m.head(x) * z


def breaks_inside(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = m.frozen(x)
        torch._dynamo.graph_break()
        z = z + m.frozen(x)
    return m.head(x) * z


def sets(m: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        torch._dynamo.graph_break()
        z = m.frozen(x)
    torch._dynamo.graph_break()
    return m.head(x) * z


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)


@pytest.mark.thorough(but=["never_entered"])
@pytest.mark.parametrize(
    "forward", [entered_later, never_entered, decorates, enables, breaks_inside, sets]
)
def test_gradients_are_those_of_the_model(forward: Callable[..., Tensor]) -> None:
    """Of a frozen part and a trained part, with graph breaks between the two."""
    model = Of(forward, frozen=nn.Linear(8, 8), head=nn.Linear(8, 8))
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
