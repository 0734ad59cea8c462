"""The least bytes of a step under the ceiling, beside the bytes that a step moves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.tools.count import Line, count_traffic, is_cast
from benchmarks.bytes_bound import bytes_bound
from tests.small_models import converted

ROWS, WIDTH = 64, 32


def stepped(model: nn.Module, x: Tensor) -> Counter[Line]:
    """The bytes of a step of the converted `model`, after one that captured it."""
    made = converted(model)
    made(x).sum().backward()
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(1)  # the copies are made again in the step that is counted
    made.zero_grad()
    result: list[Tensor] = []
    forward = count_traffic(lambda: result.append(made(x))).by_line()
    grad = torch.ones_like(result[0])
    return forward + count_traffic(lambda: result[0].backward(grad)).by_line()


def bound_of(model: nn.Module) -> int:
    return bytes_bound(autoamp.report(model).rewritten)


def test_a_linear_is_bounded_by_its_products_and_its_weight() -> None:
    """Three products in bf16, less that of the input's gradient, and the weight."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    stepped(model, torch.randn(ROWS, WIDTH))
    image, weight = ROWS * WIDTH, WIDTH * WIDTH
    products = 2 * 2 * (2 * image + weight)
    assert bound_of(model) == products + 2 * (4 + 2) * weight


class Residual(nn.Module):
    """A residual stream in fp32 with a norm before the branch, as a transformer has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.branch = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


@pytest.mark.parametrize("make", [Residual, lambda: nn.Linear(WIDTH, WIDTH)])
def test_a_step_lies_above_the_bound_by_casts_alone(make: type[nn.Module]) -> None:
    model = make()
    lines = stepped(model, torch.randn(ROWS, WIDTH))
    casts = sum(count for line, count in lines.items() if is_cast(line))
    assert lines.total() - casts < bound_of(model) <= lines.total()


def test_what_the_ceiling_keeps_fp32_costs_more() -> None:
    """The sum with the caller's fp32 data has to be read and written in fp32."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    kept, free = Residual(), Residual()
    free.forward = lambda x: free.branch(free.norm(x))  # type: ignore[method-assign]
    stepped(kept, x)
    stepped(free, x)
    assert bound_of(kept) - bound_of(free) >= (2 + 4 + 4) * ROWS * WIDTH
