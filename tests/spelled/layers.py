"""The module round a spelled-out layer: a product before it and one after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, WIDTH, HEADS = 2, 32, 4
SIZE = WIDTH // HEADS
LONGEST = 320
"""No input has more tokens: tables of angles are that large."""


@dataclass(frozen=True)
class Spelling:
    """How a layer is written, and what it is expected to become.

    `function` is called with the module and the `parts` equal parts of what the product
    before it gives; parts of attention are of shape (batch, heads, tokens, size).
    """

    function: Callable[..., Any]
    parts: int = 1
    kernel: str = ""
    """The kernel that must stand for it; "" where nothing is promised."""
    single: bool = False
    """One part, by heads all the same."""
    bare: bool = False
    """Its result is returned: no product comes after it."""


class Rounded(torch.autograd.Function):
    """Rounds a number, and its gradient, once and correctly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype).to(grad.dtype), None


class Layer(nn.Module):
    """Two products with a spelled-out layer between them.

    With `edge`, what the one gives and the other gets is rounded to that dtype.
    """

    edge: torch.dtype | None = None

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling, self.parts = spelling, spelling.parts
        self.function = spelling.function
        self.heads = spelling.parts > 1 or spelling.single
        self.before = nn.Linear(WIDTH, spelling.parts * WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.drop = nn.Dropout(0.0)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1) * 2)
        angles = torch.outer(torch.arange(LONGEST), 0.1 ** (torch.arange(SIZE) / 4))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("first", torch.tensor([3, 0]))

    def forward(self, x: Tensor) -> Any:
        result = self.layer(self.rounded(self.before(x)))
        return result if self.spelling.bare else self.after(self.rounded(result))

    def rounded(self, x: Tensor) -> Tensor:
        return x if self.edge is None else Rounded.apply(x, self.edge)

    def layer(self, h: Tensor) -> Tensor:
        """The spelled-out layer, on all of what `before` gives."""
        if not self.heads:
            return self.function(self, h)
        parts = h.view(*h.shape[:2], self.parts, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        result = self.function(self, *(parts[i] for i in range(self.parts)))
        if self.spelling.bare:
            return result
        return result.transpose(1, 2).reshape(*h.shape[:2], WIDTH)
