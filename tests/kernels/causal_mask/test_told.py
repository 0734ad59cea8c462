"""Attention that is told of its causal mask, or keeps another mask."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoamp.kernels.table import CAUSAL_MASK
from tests.kernels.chains.test_chains import WIDTH, converted, kernels, stepped
from tests.metrics import relative_error
from tests.small_models import Of


def bools(length: int) -> Tensor:
    position = torch.arange(length)
    return (position <= position[:, None])[None, None]


MASKS: dict[str, tuple[bool, Callable[[Tensor], Any]]] = {
    "of bools": (True, lambda x: bools(x.shape[1])),
    "added": (
        True,
        lambda x: torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1),
    ),
    "of the lowest number": (
        True,
        lambda x: torch.where(
            bools(x.shape[1]), 0.0, torch.finfo(torch.float32).min
        ).expand(2, 1, -1, -1),
    ),
    "a window": (False, lambda x: bools(x.shape[1]).triu(-3)),
    "of another diagonal": (
        False,
        lambda x: torch.ones(x.shape[1], x.shape[1]).tril(1).bool(),
    ),
    "of the input": (False, lambda x: bools(x.shape[1]) & (x[:, None, :, :1] < 9)),
    "a bias": (
        False,
        lambda x: torch.full((x.shape[1], x.shape[1]), -1e4).triu(1),
    ),
}


@pytest.mark.thorough(but=["of bools", "a bias"])
@pytest.mark.parametrize("name", MASKS)
def test_attention_with_a_causal_mask_needs_no_mask(name: str) -> None:
    is_causal, make = MASKS[name]

    def attend(model: nn.Module, x: Tensor) -> Tensor:
        q, k, v = model.a(x).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, make(x), scale=0.3)

    model = Of(attend, a=nn.Linear(WIDTH, 3 * WIDTH))
    x = torch.randn(2, 8, WIDTH)
    true = stepped(copy.deepcopy(model), x)
    report = converted(model, x)
    assert kernels(report) == [CAUSAL_MASK] * is_causal
    for ours, theirs in zip(stepped(model, x), true, strict=True):
        assert relative_error(ours, theirs) < 0.02
    fused = converted(Of(attend, a=model.a), x, unfused=[CAUSAL_MASK])
    assert kernels(fused) == []
