"""Einsums of which autocast on CPUs casts some parts are recorded by their parts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp


class Einsum(nn.Module):
    """`equation` of the data and of parameters of some sizes."""

    def __init__(self, equation: str, *sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.equation = equation
        self.own = nn.ParameterList([nn.Parameter(torch.randn(s)) for s in sizes])

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, *self.own)


class Lists(Einsum):
    """Einsum with its indices in lists."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(x, [0, 1, 2], *self.own[:1], [2], self.own[1], [3, 2])


class OneColumn(Einsum):
    """An index of one element: torch multiplies, and autocast rounds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ki->bk", x[:, 0, :1], *self.own)


SCALED: tuple[Any, ...] = ((64,), (32, 64))
MADE: dict[str, Callable[[], nn.Module]] = {
    "three operands": lambda: Einsum("bij,j,kj->bik", *SCALED),
    "summed alone": lambda: Einsum("bij,kj->bk", (32, 64)),
    "an ellipsis": lambda: Einsum("...j,j,kj->...k", *SCALED),
    "an index of one element": lambda: OneColumn("", (32, 1)),
    "lists": lambda: Lists("", *SCALED),
    "factors": lambda: Einsum("bij,jr,r,kr->bik", (64, 8), (8,), (32, 8)),
}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of the data and of all parameters."""
    x = x.clone().requires_grad_()
    made = model(x)
    by = torch.randn(made.shape, generator=torch.Generator().manual_seed(1))
    leaves = [x, *model.parameters()]
    found = torch.autograd.grad(made, leaves, by.to(made.dtype))
    return [t.detach().double() for t in (made, *found)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MADE)
def test_an_einsum_is_as_true_as_under_autocast(name: str, precision: str) -> None:
    """The errors of eight seeds together are at most 1.1 times those of autocast."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    options: dict[str, Any] = {"precision": precision, "loss_scale": "off"}
    torch.manual_seed(0)
    ours = autoamp.convert(MADE[name](), do_no_harm=False, strict=True, **options)
    errors: list[tuple[float, float]] = []
    for seed in range(8):
        torch.manual_seed(seed)
        model, x = MADE[name](), torch.randn(4, 10, 64)
        ours.load_state_dict(model.state_dict())
        true = gradients(copy.deepcopy(model).double(), x.double())
        found = gradients(ours, x)
        with torch.autocast("cpu", low):
            base = gradients(model, x)
        errors += [
            (float((a - t).norm() / t.norm()), float((b - t).norm() / t.norm()))
            for t, a, b in zip(true, found, base, strict=True)
        ]
    each = len(errors) // 8
    for at in range(each):
        mine, theirs = (
            math.hypot(*(pair[which] for pair in errors[at::each])) for which in (0, 1)
        )
        assert mine <= 1.1 * theirs


def is_whole(model: nn.Module, x: Tensor, **options: Any) -> bool:
    """Whether the einsum of a model is one op of its graph."""
    return "einsum" in str(autoamp.explain(model, x, precision="bf16", **options))


@pytest.mark.parametrize("equation", ["bij,kj->bik", "...j,kj->...k"])
def test_a_plain_product_stays_one_op(equation: str) -> None:
    assert is_whole(Einsum(equation, (32, 64)), torch.randn(4, 10, 64))


def test_a_gpu_computes_all_of_an_einsum_low() -> None:
    model, x = MADE["three operands"](), torch.randn(4, 10, 64)
    assert is_whole(model, x, device="h100")
    assert not is_whole(model, x)
