"""Attention, as libraries write it out, and torch's own, with masks of all kinds."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.spelled.layers import HEADS, SIZE, Layer, Spelling

Mask = Callable[[Layer, int], Tensor]
Attend = Callable[[Layer, Tensor, Tensor, Tensor], Tensor]
LOWEST = torch.finfo(torch.float32).min

# -- masks ----------------------------------------------------------------------------


def positions(n: int) -> tuple[Tensor, Tensor]:
    at = torch.arange(n)
    return at[:, None], at[None, :]


def left_padded(m: Layer, n: int) -> Tensor:
    """Causal, and the first sequence begins with padding, whose rows see nothing."""
    query, key = positions(n)
    return (key <= query) & (torch.arange(n) >= m.first[:, None])[:, None, None, :]


def nobody(m: Layer, n: int) -> Tensor:
    """The first sequence sees nothing at all."""
    return (m.first == 0)[:, None, None, None].expand(-1, 1, n, n)


def prefix(m: Layer, n: int) -> Tensor:
    query, key = positions(n)
    return (key <= query) | (key < 4)


def all_ones(m: Layer, n: int) -> Tensor:
    return torch.ones(n, 1, dtype=torch.bool)


def first_key(m: Layer, n: int) -> Tensor:
    return (torch.arange(n) < 1)[None]


SEEN: dict[str, Mask] = {
    mask.__name__: mask for mask in (left_padded, nobody, prefix, all_ones, first_key)
}
"""Masks of bools, which are true where a key is seen."""


def alibi(m: Layer, n: int) -> Tensor:
    query, key = positions(n)
    far = m.slopes[:, None, None] * (key - query)
    return far + torch.full((n, n), float("-inf")).triu(1)


def distances(m: Layer, n: int) -> Tensor:
    query, key = positions(n)
    return (key - query - 500).abs() * -1e4


def zeros(m: Layer, n: int) -> Tensor:
    return torch.zeros(1, 1, 1, 1)


def t5_bias(m: Layer, n: int) -> Tensor:
    """A trained bias by distance, and a mask of the lowest number."""
    query, key = positions(n)
    bias = m.weight[(query - key).clamp(0, 31)]
    return bias + torch.full((n, n), LOWEST).triu(1)


def additive(low: float) -> Mask:
    """`(1 - m) * low`, as BERT's and its children's."""
    return lambda m, n: (1.0 - left_padded(m, n).to(m.weight.dtype)) * low


ADDED: dict[str, Mask] = {
    mask.__name__: mask for mask in (alibi, distances, zeros, t5_bias)
} | {f"left_padded*{low:.1g}": additive(low) for low in (-1e4, -1e9, LOWEST)}
"""Masks of numbers, which are added to scores."""

# -- with a mask of bools, and a number for what is hidden ----------------------------

FILLS = {"inf": -math.inf, "1e9": -1e9, "1e4": -1e4, "min": LOWEST}


def nano_gpt(mask: Mask, low: float) -> Attend:
    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(mask(m, q.size(2)).logical_not(), low)
        return m.drop(F.softmax(scores, dim=-1)) @ v

    return attend


def gpt2(mask: Mask, low: float) -> Attend:
    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype)
        fill = max(low, torch.finfo(scores.dtype).min)
        hidden = torch.full([], fill, dtype=scores.dtype)
        scores = torch.where(mask(m, q.size(-2)), scores.to(scores.dtype), hidden)
        weights = F.softmax(scores, dim=-1).type(v.dtype)
        return torch.matmul(m.drop(weights), v)

    return attend


def megatron(mask: Mask, low: float) -> Attend:
    """Scaled by `baddbmm`, the largest score subtracted by hand, in place."""

    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, n = q.shape[0], q.shape[2]
        q, k, v = (t.reshape(b * HEADS, n, SIZE) for t in (q, k, v))
        empty = torch.zeros(b * HEADS, n, n, dtype=q.dtype)
        scores = torch.baddbmm(empty, q, k.mT, beta=0.0, alpha=SIZE**-0.5)
        scores = scores.view(b, HEADS, n, n)
        scores = scores.masked_fill_(~mask(m, n), low)
        powers = torch.exp(scores - scores.max(-1, keepdim=True).values)
        weights = powers / powers.sum(-1, keepdim=True)
        return torch.bmm(weights.view(b * HEADS, n, n), v).view(b, HEADS, n, SIZE)

    return attend


# -- with a mask of numbers, which is added -------------------------------------------


def bert(mask: Mask) -> Attend:
    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(SIZE)
        weights = torch.nn.functional.softmax(scores + mask(m, q.size(2)), dim=-1)
        return torch.matmul(m.drop(weights), v)

    return attend


def t5(mask: Mask) -> Attend:
    """No scale; the softmax in fp32."""

    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += mask(m, q.size(2))
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        return torch.matmul(m.drop(weights), v)

    return attend


def opt(mask: Mask) -> Attend:
    """Scores below the lowest number are raised to it."""

    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q * SIZE**-0.5, k.transpose(2, 3)) + mask(m, q.size(2))
        scores = torch.max(scores, torch.tensor(LOWEST, dtype=scores.dtype))
        return torch.matmul(scores.softmax(-1), v)

    return attend


def sdpa(mask: Mask) -> Attend:
    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = mask(m, q.size(2))
        return F.scaled_dot_product_attention(
            q, k, v, given if given.dtype == torch.bool else given.to(q.dtype)
        )

    return attend


# -- without a mask -------------------------------------------------------------------


def timm(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * SIZE**-0.5
    return m.drop((q @ k.transpose(-2, -1)).softmax(dim=-1)) @ v


def whisper(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = SIZE**-0.25
    scores = ((q * scale) @ (k * scale).transpose(-1, -2)).float()
    return F.softmax(scores, dim=-1).to(q.dtype) @ v


def normed_keys(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cosine attention, as Swin v2 and ViT-22B have it."""
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10
    return scores.softmax(-1) @ v


def shared_keys(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Multi-query: one head of keys and values, expanded."""
    k, v = (t[:, :1].expand(-1, HEADS, -1, -1) for t in (k, v))
    return (q @ k.transpose(-2, -1) * SIZE**-0.5).softmax(-1) @ v


def spellings() -> dict[str, Spelling]:
    """Every spelling with every mask that it can take, by name."""
    bare = (timm, whisper, normed_keys, shared_keys)
    found: dict[str, Attend] = {way.__name__: way for way in bare}
    for way in (nano_gpt, gpt2, megatron):
        for name, mask in SEEN.items():
            for fill, low in FILLS.items():
                found[f"{way.__name__}/{name}/{fill}"] = way(mask, low)
    for summed in (bert, t5, opt):
        for name, mask in ADDED.items():
            found[f"{summed.__name__}/{name}"] = summed(mask)
    for name, mask in (SEEN | ADDED).items():
        found[f"sdpa/{name}"] = sdpa(mask)
    return {f"attention/{name}": Spelling(way, 3) for name, way in found.items()}
