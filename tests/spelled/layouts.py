"""Layers whose result is returned as it is: its strides are those of fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.spelled.activations import gelu_new, halves
from tests.spelled.layers import Layer, Spelling
from tests.spelled.norms import largest, lucidrains, over_sum, t5_norm

SOFTMAX = over_sum(largest)


def turned(m: Layer, x: Tensor) -> Tensor:
    cos, sin = m.cos[: x.shape[2]], m.sin[: x.shape[2]]
    return x * cos + halves(x) * sin


def turned_joined(m: Layer, x: Tensor) -> Tensor:
    cos, sin = m.cos[: x.shape[2]], m.sin[: x.shape[2]]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1) * sin + x * cos


def heads_first(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def torchs(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


ALONE: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "every other": lambda m, x: x[:, ::2],
    "every other feature": lambda m, x: x[..., ::2],
    "transposed": lambda m, x: x.transpose(1, 2),
    "gelu of every other": lambda m, x: gelu_new(x[:, ::2]),
    "gelu transposed": lambda m, x: gelu_new(x.transpose(1, 2)),
    "every other of gelu": lambda m, x: gelu_new(x)[..., ::2],
    "softmax transposed": lambda m, x: SOFTMAX(m, x.transpose(1, 2)),
    "softmax of every other": lambda m, x: SOFTMAX(m, x[:, ::2]),
    "norm of batch last": lambda m, x: lucidrains(m, x.transpose(0, 1)),
    "rms of every other": lambda m, x: t5_norm(m, x[:, ::2]),
    "rms of batch last": lambda m, x: t5_norm(m, x.transpose(0, 1)),
    "expanded": lambda m, x: x[:, :1].expand_as(x),
    "viewed": lambda m, x: gelu_new(x).transpose(0, 1).contiguous().view(-1, 32),
}


def spellings() -> dict[str, Spelling]:
    found = {name: Spelling(way, bare=True) for name, way in ALONE.items()}
    for rotary in (turned, turned_joined):
        found[rotary.__name__] = Spelling(rotary, single=True, bare=True)
    for attend in (heads_first, torchs):
        found[attend.__name__] = Spelling(attend, 3, bare=True)
    return {f"layout/{name}": spelling for name, spelling in found.items()}
