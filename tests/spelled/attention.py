"""Attention, as libraries write it out, with masks of all kinds."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.spelled.layers import HEADS, SIZE, Layer, Spelling
from tests.spelled.masks import ADDED, LOWEST, SEEN, Mask

Attend = Callable[[Layer, Tensor, Tensor, Tensor], Tensor]
FILLS = {"inf": -math.inf, "1e9": -1e9, "1e4": -1e4, "min": None}
"""Numbers for what is hidden; None for the lowest that the scores' dtype has."""


def filling(low: float | None, scores: Tensor) -> float:
    return torch.finfo(scores.dtype).min if low is None else low


# -- with a mask of bools, and a number for what is hidden ----------------------------


def nano_gpt(mask: Mask, low: float | None) -> Attend:
    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(
            mask(m, q.size(2)).logical_not(), filling(low, scores)
        )
        return m.drop(F.softmax(scores, dim=-1)) @ v

    return attend


def gpt2(mask: Mask, low: float | None) -> Attend:
    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype)
        hidden = torch.full([], filling(low, scores), dtype=scores.dtype)
        scores = torch.where(mask(m, q.size(-2)), scores.to(scores.dtype), hidden)
        weights = F.softmax(scores, dim=-1).type(v.dtype)
        return torch.matmul(m.drop(weights), v)

    return attend


def x_transformers(mask: Mask, low: float | None) -> Attend:
    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        similar = torch.einsum("b h i d, b h j d -> b h i j", q, k) * SIZE**-0.5
        similar = similar.masked_fill(~mask(m, q.shape[2]), filling(low, similar))
        weights = similar.softmax(dim=-1)
        return torch.einsum("b h i j, b h j d -> b h i d", weights, v)

    return attend


def megatron(mask: Mask, low: float | None) -> Attend:
    """Scaled by `baddbmm`, the largest score subtracted by hand, in place."""

    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, n = q.shape[0], q.shape[2]
        q, k, v = (t.reshape(b * HEADS, n, SIZE) for t in (q, k, v))
        empty = torch.zeros(b * HEADS, n, n, dtype=q.dtype)
        scores = torch.baddbmm(empty, q, k.mT, beta=0.0, alpha=SIZE**-0.5)
        scores = scores.view(b, HEADS, n, n)
        scores = scores.masked_fill_(~mask(m, n), filling(low, scores))
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


def llama(mask: Mask) -> Attend:
    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * SIZE**-0.5 + mask(m, q.size(2))
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v)

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


def gemma(mask: Mask) -> Attend:
    """Scores are capped by tanh before the mask is added."""

    def attend(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * SIZE**-0.5
        scores = torch.tanh(scores / 50.0) * 50.0 + mask(m, q.size(2))
        return torch.matmul(F.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)

    return attend


# -- torch's own, with a mask ---------------------------------------------------------


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


def xformers(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q / SIZE**0.5, k)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).transpose(1, 2)


def whole_exp(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """llama2.c-like: the softmax written out, with an epsilon in the sum."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(SIZE)
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (powers / (powers.sum(-1, keepdim=True) + 1e-9)) @ v


def normed_keys(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cosine attention, as Swin v2 and ViT-22B have it."""
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10
    return scores.softmax(-1) @ v


def shared_keys(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Multi-query: one head of keys and values, expanded."""
    k, v = (t[:, :1].expand(-1, HEADS, -1, -1) for t in (k, v))
    return (q @ k.transpose(-2, -1) * SIZE**-0.5).softmax(-1) @ v


def grouped(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama's repeat_kv."""
    b, n = q.shape[0], q.shape[2]

    def repeat(t: Tensor) -> Tensor:
        return t[:, :2, None].expand(b, 2, 2, n, SIZE).reshape(b, HEADS, n, SIZE)

    scores = torch.matmul(q, repeat(k).transpose(2, 3)) * SIZE**-0.5
    return torch.matmul(F.softmax(scores, -1, dtype=torch.float32), repeat(v))


FILLED = (nano_gpt, gpt2, x_transformers, megatron)
SUMMED = (bert, llama, t5, opt, gemma)
BARE = (timm, whisper, xformers, whole_exp, normed_keys, shared_keys)


def spellings() -> dict[str, Spelling]:
    """Every spelling with every mask that it can take, by name."""
    found: dict[str, Attend] = {way.__name__: way for way in (*BARE, grouped)}
    for way in FILLED:
        for name, mask in SEEN.items():
            for fill, low in FILLS.items():
                found[f"{way.__name__}/{name}/{fill}"] = way(mask, low)
    for summed in SUMMED:
        for name, mask in ADDED.items():
            found[f"{summed.__name__}/{name}"] = summed(mask)
    for name, mask in (SEEN | ADDED).items():
        found[f"sdpa/{name}"] = sdpa(mask)
    return {f"attention/{name}": Spelling(way, 3) for name, way in found.items()}
