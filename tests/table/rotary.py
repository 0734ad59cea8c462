"""Rotary embeddings, as libraries write them, and chains that look like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.spelled.rotary_embeddings import halves, pairs
from tests.table.rows import linear, row

HEADS, SIZE, LENGTH, WIDTH = 2, 16, 24, 32
TWO = ("rotary", "rotary")

Embed = Callable[[Tensor, Tensor, Tensor], Tensor]


def chunks(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def back(x: Tensor) -> Tensor:
    first, second = x.split(x.shape[-1] // 2, -1)
    return torch.cat((second, -first), dim=-1)


def rolled(x: Tensor) -> Tensor:
    """Halves of other tokens."""
    x = halves(x)
    return torch.cat((x[:, :, 4:], x[:, :, :4]), 2)


def by_llama(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (halves(x) * sin)


SPELLINGS: dict[str, Embed] = {
    "llama": by_llama,
    "gpt_neox": lambda x, cos, sin: chunks(x) * sin + x * cos,
    "gpt_j": lambda x, cos, sin: x * cos + pairs(x) * sin,
    "cohere": lambda x, cos, sin: cos * x + sin * pairs(x),
    "turned_back": lambda x, cos, sin: x * cos + back(x) * sin,
    "with_a_difference": lambda x, cos, sin: x * cos - halves(x) * sin,
}

OTHERS: dict[str, Embed] = {
    "not_exchanged": lambda x, cos, sin: x * cos + x * sin,
    "one_sign": lambda x, cos, sin: (
        x * cos + torch.cat((x[..., 8:], x[..., :8]), -1) * sin
    ),
    "halves_of_other_lengths": lambda x, cos, sin: (
        x * cos + torch.cat((-x[..., 6:], x[..., :6]), -1) * sin
    ),
    "along_the_tokens": lambda x, cos, sin: (
        x * cos + torch.cat((-x[..., 12:, :], x[..., :12, :]), -2) * sin
    ),
    "of_other_tokens": lambda x, cos, sin: x * cos + rolled(x) * sin,
    "the_product_subtracted": lambda x, cos, sin: halves(x) * sin - x * cos,
    "a_weighted_sum": lambda x, cos, sin: torch.add(x * cos, halves(x) * sin, alpha=2),
}


def angles() -> Tensor:
    return torch.outer(torch.arange(LENGTH), 0.1 ** (torch.arange(SIZE) / 4))


def parts(m: Any, x: Tensor) -> list[Tensor]:
    whole = m.all(x).chunk(3, -1)
    return [part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in whole]


def attends(embed: Embed) -> Callable[[Any, Tensor], Tensor]:
    def program(m: Any, x: Tensor) -> Tensor:
        q, k, v = parts(m, x)
        cos, sin = m.cos[: x.shape[1]], m.sin[: x.shape[1]]
        q, k = embed(q, cos, sin), embed(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return m.out(mixed.transpose(1, 2).flatten(-2))

    return program


def returns(embed: Embed) -> Callable[[Any, Tensor], Any]:
    """The sums are returned: fp32, with the strides of a sum of these operands."""

    def program(m: Any, x: Tensor) -> Any:
        q, k, v = parts(m, x)
        q = halves(q) * m.sin + q * m.cos
        q = q.view(-1, LENGTH, SIZE).view(k.shape)
        k = embed(k, m.cos, m.sin)
        return m.out((q @ k.mT @ v).transpose(1, 2).flatten(-2)), q, k

    return program


def add(program: Any, name: str, kernels: tuple[str, ...], **more: Any) -> None:
    program.__name__ = name
    made: dict[str, Any] = {
        "cos": lambda: angles().cos(),
        "sin": lambda: angles().sin(),
    }
    row(
        (3, LENGTH, WIDTH),
        all=linear(WIDTH, 3 * HEADS * SIZE),
        out=linear(HEADS * SIZE, WIDTH),
        kernels=kernels,
        **{**made, **more},
    )(program)


for name, embed in SPELLINGS.items():
    add(attends(embed), name, TWO)
    add(returns(embed), f"{name}_returned", TWO)
for name, embed in OTHERS.items():
    add(attends(embed), name, ())
add(
    attends(by_llama),
    "trained_angles",
    TWO,
    cos=lambda: nn.Parameter(angles().cos()),
    sin=lambda: nn.Parameter(angles().sin()),
)
