"""Masks that hide no key: which they are, and what attention does without them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoamp
from autoamp.kernels.table import NO_MASK
from tests.kernels.causal_mask.test_masks import LENGTH, Attending, converted
from tests.small_models import Of

WIDTH, LOWEST = 24, torch.finfo(torch.float32).min

NONE: dict[str, Callable[[int], Tensor]] = {
    "ones": lambda n: torch.ones(n, n, dtype=torch.bool),
    "zeros": lambda n: torch.zeros(n, n),
    "one zero": lambda n: torch.zeros(1, 1, 1, 1),
    "one column": lambda n: torch.ones(n, 1, dtype=torch.bool),
    "positions": lambda n: (torch.arange(n)[:, None] >= 0).expand(n, n),
    "as transformers makes it": lambda n: (
        (torch.arange(n) + 0)[None, None, :, None] >= 0
    ).expand(2, -1, n, n),
    "filled nowhere": lambda n: torch.zeros(n, n).masked_fill(
        torch.arange(n)[None] < 0, -torch.inf
    ),
    "chosen everywhere": lambda n: torch.where(
        torch.arange(n)[None] >= 0, torch.zeros(n, n), LOWEST
    ),
}

SOME: dict[str, Callable[[int], Tensor]] = {
    "ones but the last": lambda n: (torch.arange(n) < n - 1)[None].expand(n, n),
    "a constant": lambda n: torch.full((n, n), -1.0),
    "all hidden but the first": lambda n: (torch.arange(n) < 1)[None],
    "one that is added": lambda n: torch.ones(n, n),
    "not a number": lambda n: torch.zeros(n, n) * torch.inf,
}


def without_mask(model: nn.Module) -> list[bool]:
    """For each graph whether its attention goes without its mask."""
    report = autoamp.report(model)
    found = {op.graph for op in report.ops if op.kernel == NO_MASK}
    return [at in found for at in range(len(report.graphs))]


def converting(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    options |= {"precision": "bf16", "do_no_harm": False, "strict": True}
    return autoamp.convert(copy.deepcopy(model), **options)


@pytest.mark.thorough(
    but=[
        "positions",
        "filled nowhere",
        "a constant",
        "one that is added",
        "zeros",
        "one column",
    ]
)
@pytest.mark.parametrize("name", [*NONE, *SOME])
def test_a_mask_goes_or_stays(name: str) -> None:
    torch.manual_seed(0)
    model, x = Attending((NONE | SOME)[name]), torch.randn(2, LENGTH, WIDTH)
    ours = converted(model)
    found, true = ours(x), model(x)
    assert without_mask(ours) == [name in NONE]
    if name == "not a number":
        assert found.isnan().all()
        return
    assert (found - true).norm() < 2**-6 * true.norm()


@pytest.mark.thorough(but=["positions"])
@pytest.mark.parametrize("name", ["positions", "as transformers makes it"])
def test_so_it_is_for_lengths_that_change(name: str) -> None:
    torch.manual_seed(0)
    model = Attending(NONE[name])
    ours = converted(model)
    for length in (LENGTH, 7, 9, 31):
        x = torch.randn(2, length, WIDTH)
        assert (ours(x) - model(x)).norm() < 2**-6 * model(x).norm()
    assert without_mask(ours) == [True, True]


@pytest.mark.parametrize("written", [False, True])
def test_a_bias_is_read_by_itself_where_no_key_is_hidden(written: bool) -> None:
    """As T5's encoder has it: the bias is learnt, and one for all layers."""

    def attend(m: Any, x: Tensor) -> Tensor:
        n = x.shape[1]
        shown = (torch.arange(n)[None, None, :, None] >= 0).expand(2, 1, n, n)
        bias = m.bias(torch.arange(n)[None, :] % 4).permute(2, 0, 1)[None]
        bias = bias + torch.zeros(n, 1)
        for layer in (m.a, m.b):
            q = layer(x).view(2, n, 3, 8).transpose(1, 2)
            mask = torch.where(shown, bias, LOWEST)
            if written:
                bias += 1.0
            x = F.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).flatten(2)
        return x

    torch.manual_seed(0)
    parts = {name: nn.Linear(WIDTH, WIDTH) for name in "ab"}
    model = Of(attend, bias=nn.Embedding(4, 3), **parts)
    x = torch.randn(2, LENGTH, WIDTH)
    true = copy.deepcopy(model)
    ours = converted(model)
    for each in (ours, true):
        each(x).square().sum().backward()
    assert without_mask(ours) == [not written]
    gone = "where" not in autoamp.report(ours).graphs[0].code
    assert gone != written
    for one, other in zip(ours.parameters(), true.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() <= 0.03 * other.grad.norm()


def test_it_can_be_switched_off() -> None:
    ours = converting(Attending(NONE["ones"]), unfused=[NO_MASK])
    ours(torch.randn(2, LENGTH, WIDTH))
    assert without_mask(ours) == [False]
