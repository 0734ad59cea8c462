"""A weight used 257 times whose true gradient is 257 gets 257 in bf16.

Summed in bf16 the gradient stops at 256, where adding 1 no longer changes a number of
eight significant bits.  So every count here is above 256, and none is a number of bf16:
one that is rounded once, at the end, shows as well.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.metrics import count_ops
from tests.quick import some_slow

# What Dynamo itself warns of where a value crosses a graph break.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)

USES = 257
WIDTH = 2


class OneForward(nn.Module):
    """`F.linear` with the same weight, over and over."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses = uses
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.repeat(x, self.uses)

    def repeat(self, x: Tensor, uses: int) -> Tensor:
        total = torch.zeros_like(x)
        for _ in range(uses):
            total = total + functional.linear(x, self.weight)
        return total


class ScaledMatmul(OneForward):
    """A product with one weight inside a matmul with another, both used each time."""

    def __init__(self, uses: int) -> None:
        super().__init__(uses)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def repeat(self, x: Tensor, uses: int) -> Tensor:
        total = torch.zeros_like(x)
        for _ in range(uses):
            total = total + (x * self.scale) @ self.weight
        return total


class TransposedOnce(OneForward):
    """`w.t()` is taken once, before the loop that uses it."""

    def repeat(self, x: Tensor, uses: int) -> Tensor:
        transposed = self.weight.t()
        total = torch.zeros_like(x)
        for _ in range(uses):
            total = total + x @ transposed
        return total


class Tied(nn.Module):
    """Two modules that share one weight, half the uses each."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses = uses
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.constant_(self.first.weight, 0.5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for _ in range(self.uses // 2):
            total = total + self.first(x) + self.second(x)
        return total


class AcrossBreak(OneForward):
    """Half the uses before a graph break, half after it."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.repeat(x, self.uses // 2)
        torch._dynamo.graph_break()
        return first + self.repeat(x, self.uses // 2)


class InCheckpoint(OneForward):
    """Every use inside a checkpointed region, recomputed in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.repeat, x, self.uses, use_reentrant=False)


class TwoCheckpoints(OneForward):
    """Half the uses in each of two checkpointed regions."""

    def forward(self, x: Tensor) -> Tensor:
        half = self.uses // 2
        first = checkpoint(self.repeat, x, half, use_reentrant=False)
        return first + checkpoint(self.repeat, x, half, use_reentrant=False)


# Where there are two halves, each has so many uses.
MODELS = {
    OneForward: USES,
    ScaledMatmul: USES,
    TransposedOnce: USES,
    Tied: 2 * USES,
    AcrossBreak: 2 * USES,
    InCheckpoint: USES,
    TwoCheckpoints: 2 * USES,
}


def gradients(model: nn.Module, context: bool = False) -> dict[str, list[float]]:
    """The distinct values in the gradient of each parameter."""
    x = torch.ones(1, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=context):
        y = model(x)
    y.float().sum().backward()
    return {n: p.grad.unique().tolist() for n, p in model.named_parameters()}


def check(build: Callable[[int], nn.Module], backend: str) -> None:
    torch._dynamo.reset()
    uses = MODELS[build]
    model = autoamp.convert(
        build(uses), precision="bf16", backend=backend, do_no_harm=False, strict=True
    )
    found: dict[str, list[float]] = {}
    counts = count_ops(lambda: found.update(gradients(model)))
    assert found == {name: [float(uses)] for name in found}
    if backend == "eager":  # in fp32 it would be no feat
        assert counts.low_flops == counts.flops.total() > 0
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    report = autoamp.report(model)
    assert report.runs >= (2 if build is AcrossBreak else 1)


# One region and two graphs are the same code as two regions.
@pytest.mark.thorough(but=["OneForward"])
@pytest.mark.parametrize("build", some_slow(MODELS, lambda m: m is TwoCheckpoints))
def test_gradient_is_the_number_of_uses(build: Callable[[int], nn.Module]) -> None:
    check(build, "eager")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("build", MODELS)
def test_inductor_too(build: Callable[[int], nn.Module]) -> None:
    check(build, "inductor")


@pytest.mark.parametrize("build", MODELS)
def test_the_true_gradient_is_the_number_of_uses(
    build: Callable[[int], nn.Module],
) -> None:
    found = gradients(build(MODELS[build]))
    assert found == {name: [float(MODELS[build])] for name in found}


@pytest.mark.parametrize("build", [OneForward, Tied])
def test_autocast_loses_all_but_256(build: Callable[[int], nn.Module]) -> None:
    """The reason for this file: autocast's cached copy sums its gradient in bf16.

    (`w.t()` is not cached, being no leaf: cast at each use, it loses nothing.)
    """
    assert gradients(build(USES), context=True) == {
        name: [256.0] for name, _ in build(USES).named_parameters()
    }
