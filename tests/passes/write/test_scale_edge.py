"""Gradients of small programs are the same bits with a loss scale, and without one.

tests/training/test_boundary.py holds that of many more programs, and takes longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.small_models import WIDTH, Of, converted


def a_hook(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    y.register_hook(lambda gradient: gradient * 3)
    result: Tensor = m.fc(y.tanh())
    return result


def a_write_after_a_region_without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = x.sum()
    rows = torch.zeros(3, WIDTH)
    rows[1] = m.fc(x)[0]
    return rows * factor


def a_view_that_is_read_after_a_write(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    base = m.fc(x).float().clone()
    row = base[0]
    base.mul_(2)
    return base, row.sin()


def a_result_that_its_op_saves(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    total = m.fc(x).cumsum(0)
    return total.exp(), total.sin()


PROGRAMS = [
    a_hook,
    a_write_after_a_region_without_gradients,
    a_view_that_is_read_after_a_write,
    a_result_that_its_op_saves,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_loss_scale_changes_no_bit(program: Callable[..., Any]) -> None:
    found = []
    for scale in (2.0**10, "off"):
        torch.manual_seed(0)
        layer = nn.Linear(WIDTH, WIDTH)
        model = converted(Of(program, fc=layer), loss_scale=scale)
        x = torch.randn(3, WIDTH, requires_grad=True)
        given = model(x)
        results = given if isinstance(given, tuple) else (given,)
        loss = sum(each.double().square().sum() for each in results)
        wanted = (x, layer.weight, layer.bias)
        found.append(torch.autograd.grad(loss, wanted))
    for scaled, plain in zip(*found, strict=True):
        assert torch.equal(scaled, plain)
