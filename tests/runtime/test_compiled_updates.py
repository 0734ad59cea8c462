"""Functions that update weights run as the script compiled them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("automatic")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="eager")


def orthogonal(g: Tensor) -> Tensor:
    x = g / g.norm()
    for _ in range(3):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def descend(p: Tensor, g: Tensor) -> None:
    p.add_(g @ g.mT @ g, alpha=-0.1)


def descend_through_a_view(p: Tensor, g: Tensor) -> None:
    p.view(-1)[:] -= 0.1 * (g @ g.mT @ g).view(-1)


def descend_all(p: Tensor, g: Tensor) -> None:
    torch._foreach_add_([p], [g @ g.mT @ g])


def average(p: Tensor, g: Tensor) -> None:
    torch.lerp(p, g @ g.mT @ g, 0.1, out=p)


class Muon(torch.optim.Optimizer):
    def __init__(self, params: Any, make: Callable[..., Any]) -> None:
        super().__init__(params, {})
        self.direction = make(orthogonal)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(self.direction(p.grad), alpha=0.1)
        return loss


def weight(trained: bool = True) -> nn.Parameter:
    p = nn.Parameter(torch.randn(8, 8), requires_grad=trained)
    p.grad = torch.randn(8, 8) if trained else None
    return p


@pytest.mark.parametrize(
    "update", [descend, descend_through_a_view, descend_all, average]
)
@pytest.mark.parametrize("trained", [True, False])
def test_a_compiled_function_that_writes_to_a_parameter(
    update: Callable[..., None], trained: bool
) -> None:
    p, g = weight(trained), torch.randn(8, 8)
    expected = p.detach().clone()
    with torch.no_grad():
        compiled(update)(p, g)
        update(expected, g)
    # Dynamo of torch 2.11 makes a product and a sum of `alpha`, which round twice.
    # What a cast to bf16 would change is a thousand times larger.
    torch.testing.assert_close(p.detach(), expected)


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_step_of_an_optimizer(whole: bool) -> None:
    p = weight()
    expected = p.detach().sub(orthogonal(p.grad), alpha=0.1)
    optimizer = Muon([p], (lambda function: function) if whole else compiled)
    step = compiled(optimizer.step) if whole else optimizer.step
    step()
    assert torch.equal(p, expected)


def test_other_functions_are_rewritten_as_before() -> None:
    """A closure's loss, and a function that writes to a tensor that is no weight."""

    def loss_of(p: Tensor, x: Tensor) -> Tensor:
        return (x @ p).square().mean()

    def scaled(p: Tensor, x: Tensor) -> Tensor:
        hidden = x @ p
        hidden.mul_(2)
        return hidden

    p, x = weight(), torch.randn(8, 8)
    fast, seen = compiled(loss_of), []

    def closure() -> Tensor:
        seen.append(fast(p, x))
        return seen[-1]

    Muon([p], lambda function: function).step(closure)
    assert not torch.equal(seen[0], loss_of(p, x))
    assert not torch.equal(compiled(scaled)(p, x), scaled(p, x))
