"""Masks, as libraries make them: of bools, where True is seen, and of numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.spelled.layers import Layer

Mask = Callable[[Layer, int], Tensor]


def positions(n: int) -> tuple[Tensor, Tensor]:
    at = torch.arange(n)
    return at[:, None], at[None, :]


def padded(m: Layer, n: int) -> Tensor:
    """Tokens that are there: the first sequence begins with padding (left)."""
    return torch.arange(n)[None] >= m.first[:, None]


def buffered(m: Layer, n: int) -> Tensor:
    return m.causal[:, :, :n, :n] == 1


def trils(m: Layer, n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def compared(m: Layer, n: int) -> Tensor:
    query, key = positions(n)
    return (key <= query)[None, None]


def left_padded(m: Layer, n: int) -> Tensor:
    """Left padding and causal: rows of padding see nothing."""
    return trils(m, n)[None, None] & padded(m, n)[:, None, None, :]


def keys_padded(m: Layer, n: int) -> Tensor:
    return padded(m, n)[:, None, None, :]


def nobody(m: Layer, n: int) -> Tensor:
    """The first sequence sees nothing at all."""
    return (m.first == 0)[:, None, None, None].expand(-1, 1, n, n)


def window(m: Layer, n: int) -> Tensor:
    query, key = positions(n)
    return (key <= query) & (query - key < 5)


def prefix(m: Layer, n: int) -> Tensor:
    query, key = positions(n)
    return (key <= query) | (key < 4)


def strictly(m: Layer, n: int) -> Tensor:
    """Not even itself: the first row sees nothing."""
    query, key = positions(n)
    return key < query


def long_ago(m: Layer, n: int) -> Tensor:
    """Causal, as long as there are at most 64 tokens."""
    query, key = positions(n)
    return (key <= query) | (query >= 64)


def all_ones(m: Layer, n: int) -> Tensor:
    return torch.ones(n, 1, dtype=torch.bool)


def first_key(m: Layer, n: int) -> Tensor:
    return (torch.arange(n) < 1)[None]


def joined(m: Layer, n: int) -> Tensor:
    """Half of the keys by one rule, half by another."""
    half = n // 2
    free = torch.ones(n, half, dtype=torch.bool)
    return torch.cat([free, trils(m, n)[:, half:]], -1)[None]


def expanded(m: Layer, n: int) -> Tensor:
    return trils(m, n)[None, None].expand(len(m.first), 1, n, n)


def everything_but_one(m: Layer, n: int) -> Tensor:
    query, key = positions(n)
    return (key <= query) & ~((query == 3) & (key == 1))


SEEN: dict[str, Mask] = {
    mask.__name__: mask
    for mask in (
        *(buffered, trils, compared, left_padded, keys_padded, nobody, window, prefix),
        *(strictly, long_ago, all_ones, first_key, joined, expanded),
        everything_but_one,
    )
}
"""Masks of bools."""


def alibi(m: Layer, n: int) -> Tensor:
    query, key = positions(n)
    far = m.slopes[:, None, None] * (key - query)
    return far + torch.full((n, n), float("-inf")).triu(1)


def distances(m: Layer, n: int) -> Tensor:
    query, key = positions(n)
    return (key - query - 500).abs() * -1e4


def graded(m: Layer, n: int) -> Tensor:
    """All hidden keys, at differing depths."""
    return -1e4 - torch.arange(n) * 2.0


def zeros(m: Layer, n: int) -> Tensor:
    return torch.zeros(1, 1, 1, 1)


def t5_bias(m: Layer, n: int) -> Tensor:
    """A trained bias by distance, and a mask of the lowest number."""
    query, key = positions(n)
    bias = m.weight[(query - key).clamp(0, 31)]
    return bias + torch.full((n, n), torch.finfo(torch.float32).min).triu(1)


def additive(mask: Mask, low: float) -> Mask:
    """`(1 - m) * low`, as BERT's and its children's."""

    def made(m: Layer, n: int) -> Tensor:
        return (1.0 - mask(m, n).to(m.weight.dtype)) * low

    return made


LOWEST = torch.finfo(torch.float32).min

ADDED: dict[str, Mask] = {
    mask.__name__: mask for mask in (alibi, distances, graded, zeros, t5_bias)
}
for _name in ("compared", "left_padded", "keys_padded", "nobody", "window", "strictly"):
    for _low in (-1e4, -1e9, LOWEST):
        ADDED[f"{_name}*{_low:.1g}"] = additive(SEEN[_name], _low)
"""Masks of numbers, which are added to scores."""
