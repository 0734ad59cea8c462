"""Regions without gradients, across graph breaks; a copy of an input."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from tests.table.rows import linear, row

GIVEN: dict[str, Any] = {
    "frozen": linear(8),
    "head": linear(8),
    "without": {"exported": "a graph break cannot be exported"},
}


@row((4, 8), **GIVEN)
def entered_later(m: Any, x: Tensor) -> Tensor:
    region = torch.no_grad()
    torch._dynamo.graph_break()
    y = m.head(x)
    with region:
        z = m.frozen(x)
    return y * z


@row((4, 8), **GIVEN)
def never_entered(m: Any, x: Tensor) -> Tensor:
    region = contextlib.nullcontext() if m.training else torch.no_grad()
    other = torch.no_grad()
    torch._dynamo.graph_break()
    with region:
        y = m.head(x)
    return y * m.frozen(x) + (other is None)


@row((4, 8), **GIVEN)
def decorates(m: Any, x: Tensor) -> Tensor:
    def make(module: nn.Module) -> Any:
        torch._dynamo.graph_break()
        return module

    frozen = torch.no_grad()(make(m.frozen).forward)
    return m.head(x) * frozen(x)


@row((4, 8), **GIVEN)
def enables(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        region = torch.enable_grad()
        torch._dynamo.graph_break()
        z = m.frozen(x)
        with region:
            return m.head(x) * z


@row((4, 8), **GIVEN)
def breaks_inside(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = m.frozen(x)
        torch._dynamo.graph_break()
        z = z + m.frozen(x)
    return m.head(x) * z


@row((4, 8), **GIVEN)
def sets(m: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        torch._dynamo.graph_break()
        z = m.frozen(x)
    torch._dynamo.graph_break()
    return m.head(x) * z


@row((2, 8), head=linear(8))
def cast_to_its_own_dtype(m: Any, x: Tensor) -> Tensor:
    """Which is a copy here, and `x.to(x.dtype)` is none."""
    other = torch.ops.aten._to_copy.default(x, dtype=torch.float32)
    other += 1
    return m.head(other) + x.sum()
