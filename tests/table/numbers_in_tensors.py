"""Numbers in tensors that fp16 rounds to zero, or that are beyond its range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.table.rows import linear, row

WIDTH = 16
PARTS: dict[str, Any] = {
    "fc": linear(WIDTH),
    "small": lambda: torch.tensor(1e-8),
    "one": lambda: torch.tensor([1e-8]),
    "large": lambda: torch.tensor(1e9),
    "trained": lambda: nn.Parameter(torch.tensor(1e-8)),
}
Spellings = dict[str, Callable[[Any, Tensor], Tensor]]

SMALL: Spellings = {
    "number": lambda m, h: h * 1e-8,
    "tensor": lambda m, h: h * torch.tensor(1e-8),
    "its kin": lambda m, h: h * h.new_tensor(1e-8),
    "as tensor": lambda m, h: torch.as_tensor(1e-8) * h,
    "scalar tensor": lambda m, h: h * torch.scalar_tensor(1e-8),
    "full": lambda m, h: h * torch.full((), 1e-8),
    "new full": lambda m, h: h * h.new_full((), 1e-8),
    "new full row": lambda m, h: h * h.new_full((WIDTH,), 1e-8),
    "full like": lambda m, h: h * torch.full_like(h, 1e-8),
    "filled": lambda m, h: h * torch.empty_like(h).fill_(1e-8),
    "buffer": lambda m, h: h * m.small,
    "element": lambda m, h: h * m.one[0],
    "copies": lambda m, h: h * torch.tensor(1e-8).clone().detach().to("cpu"),
    "computed": lambda m, h: h * torch.tensor(1e-4) ** 2,
    "negative": lambda m, h: h * -torch.tensor(1e-8),
}

LARGE: Spellings = {
    "number": lambda m, h: h / 1e9,
    "tensor": lambda m, h: h / torch.tensor(1e9),
    "whole": lambda m, h: h / torch.tensor(10**9),
    "buffer": lambda m, h: h / m.large,
    "negative": lambda m, h: h / -torch.tensor(1e9),
    "full": lambda m, h: h / torch.full((), 1e9),
    "new full": lambda m, h: h / h.new_full((1,), 1e9),
    "full like": lambda m, h: h / torch.full_like(h, 1e9),
    "filled": lambda m, h: h / torch.empty_like(h).fill_(1e9),
}

GUARDS: Spellings = {
    "sum": lambda m, n: n + torch.tensor(1e-8),
    "buffer": lambda m, n: n + m.small,
    "maximum": lambda m, n: torch.maximum(n, torch.tensor(1e-8)),
    "clamp": lambda m, n: torch.clamp(n, min=torch.full((), 1e-8)),
    "where": lambda m, n: torch.where(n > 1, n, torch.tensor(1e-8)),
    "fill": lambda m, n: n.masked_fill(n < 1, torch.tensor(1e-8)),
}


# To mend: a constant's fake tensor belongs to the mode of Dynamo's first trace.
MIXED = {"tensorflow": "torch refuses a constant of another fake mode (`clone`)"}


@row((32, WIDTH), without=MIXED, **PARTS)
def small(m: Any, x: Tensor) -> list[Tensor]:
    return [spelt(m, m.fc(x)) for spelt in SMALL.values()]


@row((32, WIDTH), **PARTS)
def guarding_a_division_by_zero(m: Any, x: Tensor) -> list[Tensor]:
    """A norm of zero: autocast divides by it in fp16."""
    h = m.fc(x)
    none = (h - h).amax(-1, keepdim=True)
    return [h * 1e-3 / guard(m, none) for guard in GUARDS.values()]


@row((32, WIDTH), *(lambda x=x: torch.tensor(x) for x in (1e-8, 1.0, 1e9)), **PARTS)
def known_to_nobody(m: Any, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    """0-dim inputs and parameters, and what is computed of them, promote nothing."""
    h = m.fc(x)
    return [
        h * a + h * m.trained,
        h * b + h / (b * 2) + h * h.abs().amax(),
        h / c + h / (c * 2) + h / -c,
    ]


@row((32, WIDTH), **PARTS)
def written_over(m: Any, x: Tensor) -> Tensor:
    scale = torch.tensor(1.0)
    scale.fill_(1e-8)
    return m.fc(x) * scale


@row((32, WIDTH), **PARTS)
def normed_rows_of_zeros(m: Any, x: Tensor) -> Tensor:
    return m.fc(nn.functional.normalize(m.fc(x) * 0, dim=-1))
