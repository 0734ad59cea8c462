"""A weight used 257 times whose true gradient is 257 gets 257 in bf16.

Summed in bf16 the gradient stops at 256, where adding 1 no longer changes a number of
eight significant bits.  So every count here is above 256, and none is a number of bf16:
one that is rounded once, at the end, shows as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.metrics import count_ops
from tests.quick import some_slow
from tests.small_models import Of, converted

# What Dynamo itself warns of where a value crosses a graph break.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)

USES = 257
WIDTH = 2


def one_forward(m: Any, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for _ in range(USES):
        total = total + functional.linear(x, m.weight)
    return total


def scaled_matmul(m: Any, x: Tensor) -> Tensor:
    """A product with one weight inside a matmul with another, both used each time."""
    total = torch.zeros_like(x)
    for _ in range(USES):
        total = total + (x * m.scale) @ m.weight
    return total


def transposed_once(m: Any, x: Tensor) -> Tensor:
    transposed, total = m.weight.t(), torch.zeros_like(x)
    for _ in range(USES):
        total = total + x @ transposed
    return total


def tied(m: Any, x: Tensor) -> Tensor:
    """Two modules share one weight."""
    total = torch.zeros_like(x)
    for _ in range(USES):
        total = total + m.first(x) + m.second(x)
    return total


def across_break(m: Any, x: Tensor) -> Tensor:
    first = one_forward(m, x)
    torch._dynamo.graph_break()
    return first + one_forward(m, x)


def in_checkpoint(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: one_forward(m, x), x, use_reentrant=False)


def two_checkpoints(m: Any, x: Tensor) -> Tensor:
    return in_checkpoint(m, x) + in_checkpoint(m, x)


PROGRAMS: dict[Callable[..., Tensor], int] = {
    one_forward: USES,
    scaled_matmul: USES,
    transposed_once: USES,
    tied: 2 * USES,
    across_break: 2 * USES,
    in_checkpoint: USES,
    two_checkpoints: 2 * USES,
}


def model_of(program: Callable[..., Tensor]) -> nn.Module:
    if program is tied:
        first, second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        second.weight = first.weight
        nn.init.constant_(first.weight, 0.5)
        return Of(program, first=first, second=second)
    parts = {"weight": nn.Parameter(torch.full((WIDTH, WIDTH), 0.5))}
    if program is scaled_matmul:
        parts["scale"] = nn.Parameter(torch.ones(WIDTH))
    return Of(program, **parts)


def gradients(model: nn.Module, autocast: bool = False) -> set[float]:
    """The distinct values in the gradients of the parameters."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(torch.ones(1, WIDTH))
    y.float().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert {grad.dtype for grad in grads} == {torch.float32}
    return {each for grad in grads for each in grad.unique().tolist()}


def check(program: Callable[..., Tensor], backend: str) -> None:
    torch._dynamo.reset()
    model, found = converted(model_of(program), backend=backend), set()
    counts = count_ops(lambda: found.update(gradients(model)))
    assert found == {float(PROGRAMS[program])}
    if backend == "eager":  # in fp32 it would be no feat
        assert counts.low_flops == counts.flops.total() > 0
    assert autoamp.report(model).runs >= (2 if program is across_break else 1)


# One region and two graphs are the same code as two regions.
@pytest.mark.parametrize("program", some_slow(PROGRAMS, lambda p: p is two_checkpoints))
def test_gradient_is_the_number_of_uses(program: Callable[..., Tensor]) -> None:
    check(program, "eager")
    assert gradients(model_of(program)) == {float(PROGRAMS[program])}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", PROGRAMS)
def test_inductor_too(program: Callable[..., Tensor]) -> None:
    check(program, "inductor")


@pytest.mark.parametrize("program", [one_forward, tied])
def test_autocast_loses_all_but_256(program: Callable[..., Tensor]) -> None:
    """The reason for this file: autocast's cached copy sums its gradient in bf16.

    (`w.t()` is not cached, being no leaf: cast at each use, it loses nothing.)
    """
    assert gradients(model_of(program), autocast=True) == {256.0}
