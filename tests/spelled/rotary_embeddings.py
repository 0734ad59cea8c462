"""Rotary embeddings, as libraries write them: before attention, and alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.spelled.layers import Layer, Spelling


def halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def raw_view(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The exchanged halves in one `cat`, whose own strides a view asks for."""
    b, h, n, d = x.shape
    first, second = x.chunk(2, dim=-1)
    mixed = torch.cat((-second, first), dim=-1) * sin + x * cos
    return mixed.view(b * h, n, d).view(b, h, n, d)


def complexes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """llama2.c's, by the two numbers of a pair."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, ::2], sin[:, ::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def in_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers' for vision: in fp32 and back."""
    y = x.float()
    return (y * cos.float() + halves(y) * sin.float()).to(x.dtype)


def partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """GPT-NeoX's: half of the features turn."""
    turned, passed = x[..., :4], x[..., 4:]
    cos, sin = cos[:, :4], sin[:, :4]
    return torch.cat([turned * cos + halves(turned) * sin, passed], -1)


ROTARY: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "llama": lambda x, cos, sin: x * cos + halves(x) * sin,
    "gpt_j": lambda x, cos, sin: x * cos + pairs(x) * sin,
    **{f.__name__: f for f in (raw_view, complexes, in_fp32, partly)},
}

Embed = Callable[[Tensor, Tensor, Tensor], Tensor]


def turned(embed: Embed) -> Callable[..., Tensor]:
    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = m.cos[: q.shape[2]], m.sin[: q.shape[2]]
        q, k = embed(q, cos, sin), embed(k, cos, sin)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def turned_alone(embed: Embed) -> Callable[..., Tensor]:
    """Nothing after it averages the roundings."""

    def function(m: Layer, x: Tensor) -> Tensor:
        return embed(x, m.cos[: x.shape[2]], m.sin[: x.shape[2]])

    return function


def spellings() -> dict[str, Spelling]:
    found = {}
    for name, embed in ROTARY.items():
        found[f"rotary/{name}"] = Spelling(turned(embed), 3)
        found[f"rotary alone/{name}"] = Spelling(turned_alone(embed), 1, single=True)
    return found
