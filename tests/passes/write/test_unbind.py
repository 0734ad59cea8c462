"""Selects that show a whole tensor become one `unbind`, with the same gradients.

The graph is shown in golden/unbind.txt of tests/passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.small_models import Of, converted

WIDTH = 16
X = torch.randn(4, WIDTH)


def parts(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).view(-1, 3, WIDTH)


def whole(m: Any, x: Tensor) -> Tensor:
    p = parts(m, x)
    return m.other(p[:, 0] * p[:, 1] + p[:, -1])


def partly(m: Any, x: Tensor) -> Tensor:
    p = parts(m, x)
    return m.other(p[:, 0] + p[:, 1])


def twice(m: Any, x: Tensor) -> Tensor:
    p = parts(m, x)
    return m.other(p[:, 0] + p[:, 1] + p[:, 2] * p[:, 2].sin() * p[:, 0])


def written(m: Any, x: Tensor) -> Tensor:
    """What `unbind` gives cannot be written to in place."""
    p = parts(m, x)
    p[:, 0].mul_(2)
    return m.other(p[:, 0] + p[:, 1] + p[:, 2])


def returned(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A caller may write to a part that it is given."""
    p = parts(m, x)
    return m.other(p[:, 0] + p[:, 1] + p[:, 2]), p[:, 0]


def trained(function: Callable[..., Any], **options: Any) -> tuple[list[Tensor], int]:
    """The gradients of a step, and how many selects have a gradient of their own."""
    torch.manual_seed(0)
    fc, other = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
    model = converted(Of(function, fc=fc, other=other), **options)
    model(X)
    with torch.profiler.profile(acc_events=True) as profiled:
        result = model(X)
        first = result[0] if isinstance(result, tuple) else result
        first.square().sum().backward()
    selects = [e for e in profiled.events() if e.name == "aten::select_backward"]
    return [p.grad for p in model.parameters()], len(selects)


def test_the_gradients_are_the_same_bits_without_the_selects() -> None:
    ours, selects = trained(whole)
    theirs, before = trained(whole, fuse=False)
    assert (selects, before) == (0, 3)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("function", [partly, twice, written, returned])
def test_other_selects_stay(function: Callable[..., Any]) -> None:
    assert trained(function)[1] >= 2
