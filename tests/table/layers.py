"""Layers as they stand in most models, alone and in a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.table.rows import linear, numbers, parameter, row

IMAGE = (4, 3, 16, 16)


@row((4, 8), first=linear(8, 16), last=linear(16, 4), low=("linear",))
def mlp(m: Any, x: Tensor) -> Tensor:
    return m.last(F.gelu(m.first(x)))


@row((4, 8), fc=linear(8), low=("linear",))
def residual(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + torch.relu(m.fc(x))
    return x


@row((4, 8), weight=parameter(8, 8), low=("matmul",))
def product(m: Any, x: Tensor) -> Tensor:
    return x @ m.weight


@row((4, 6, 8), fc=linear(8), norm=lambda: nn.LayerNorm(8))
def normed(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.norm(m.fc(x)))


@row(IMAGE, conv=lambda: nn.Conv2d(3, 8, 3), norm=lambda: nn.BatchNorm2d(8))
def convolved(m: Any, x: Tensor) -> Tensor:
    return F.max_pool2d(torch.relu(m.norm(m.conv(x))), 2)


@row(IMAGE, conv=lambda: nn.Conv2d(3, 8, 3), norm=lambda: nn.GroupNorm(2, 8))
def averaged(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.conv(x)).mean((2, 3))


@row(numbers(16, 4, 6), table=lambda: nn.Embedding(16, 8), fc=linear(8))
def embedded(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.table(x))


@row(numbers(16, 4, 6), table=lambda: nn.Embedding(16, 8), fc=linear(8))
def tied(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.fc(m.table(x)), m.table.weight)


@row((4, 8), numbers(4, 4), fc=linear(8, 4), low=("linear",))
def loss(m: Any, x: Tensor, labels: Tensor) -> Any:
    logits = m.fc(x)
    return {"loss": F.cross_entropy(logits, labels), "logits": logits, "n": 3}


@row((4, 6, 8), fc=linear(8, 24), out=linear(8), low=("linear",))
def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.fc(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(y.transpose(1, 2).flatten(2))


@row((4, 6, 8), rnn=lambda: nn.GRU(8, 8, batch_first=True), fc=linear(8))
def recurrent(m: Any, x: Tensor) -> Any:
    hidden, last = m.rnn(x)
    return m.fc(hidden), last


@row((4, 8), fc=linear(8), drop=lambda: nn.Dropout(0.5))
def dropped(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.drop(m.fc(x)))


@row((3, 4, 16), norm=lambda: nn.RMSNorm(16), fc=linear(16))
def norm_of_data(m: Any, x: Tensor) -> Tensor:
    """The weight of the norm trains, and its data takes no gradient."""
    return m.fc(m.norm(x.detach() * 2))
