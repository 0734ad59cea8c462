"""Programs that lose digits where anything is rounded that autocast would not round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from tests.table.rows import linear, row

WIDTH = 16
PARTS: dict[str, Any] = {
    "fc": linear(WIDTH),
    "other": linear(WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "table": lambda: nn.Embedding(600, WIDTH),
    "offset": lambda: nn.Parameter(1e3 + torch.randn(WIDTH)),
    "mean": lambda: torch.full((WIDTH,), 1e4),
    "spread": lambda: torch.full((WIDTH,), 3.0),
}


def around(middle: float) -> Callable[[], Tensor]:
    return lambda: middle + torch.randn(64, WIDTH)


def standardised(m: Any, x: Tensor) -> Tensor:
    return m.fc((x - x.mean(0)) / (x.std(0) + 1e-5))


def lifted(m: Any, x: Tensor) -> Tensor:
    scores = m.fc(x) @ m.other(x).T
    return (scores + torch.full(scores.shape, 1000.0)).softmax(-1) @ x


def branches(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """One value with eight low readers, whose gradients are summed."""
    h = x * m.spread
    return tuple(F.linear(h, m.fc.weight.roll(i, 0)) for i in range(8))


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.fc(x)
    h += x * 3
    h *= m.spread
    return m.other(h)


def filled(m: Any, x: Tensor) -> Tensor:
    h = m.fc(x)
    h[:, 0] = 0
    h[1:3] = 0.5
    return m.other(h)


def pieces(m: Any, x: Tensor) -> Tensor:
    left, right = (x * m.spread).chunk(2, 0)
    return m.fc(left) + m.other(right.flip(0))


def products(m: Any, x: Tensor) -> list[Tensor]:
    """Of vectors and of elements, which are no matrix products, and one that is."""
    h = x * m.spread
    return [
        torch.outer(h[0], x[1]),
        torch.dot(h[0], x[1]),
        torch.mv(m.fc.weight, h[1]),
        torch.addr(m.fc.weight, x[0], x[1]),
        torch.kron(h[:2], x[2:4]),
        torch.einsum("ij->i", h),
        torch.einsum("ij,ij->ij", h, x),
        F.bilinear(x, x, m.fc.weight[None] * m.spread),
    ]


CASES: dict[str, tuple[float, Callable[..., Any]]] = {
    "batch norm": (1e3, lambda m, x: m.fc(F.batch_norm(x, None, None, training=True))),
    "layer norm": (1e4, lambda m, x: m.fc(m.norm(x))),
    "group norm": (1e3, lambda m, x: m.fc(F.group_norm(x, 4))),
    "rms norm": (1e3, lambda m, x: m.fc(F.rms_norm(x, (WIDTH,), m.spread))),
    "standardised": (1e3, standardised),
    "neighbours": (1e3, lambda m, x: m.fc(x[1:] - x[:-1])),
    "denormalised": (0, lambda m, x: m.fc(x) * m.spread + m.mean),
    "norm of a sum": (0, lambda m, x: m.fc(m.norm(m.other(x) + m.mean))),
    "parameter": (0, lambda m, x: m.offset + m.fc(x)),
    "less a branch": (0, lambda m, x: x * 100 - m.fc(x)),
    "full": (0, lifted),
    "constant": (0, lambda m, x: m.fc((x + 1e4) - 1e4)),
    "stream": (1e3, lambda m, x: m.other(m.norm(x + m.fc(m.norm(x))))),
    "positions": (0, lambda m, x: m.fc(x) * (torch.arange(WIDTH) * 30.7).cos()),
    "branches": (0, branches),
    "in place": (0, in_place),
    "filled": (0, filled),
    "pieces": (1e3, pieces),
    "products": (0, products),
}
"""Where the data lie, and what is made of them."""

for _name, (_middle, _function) in CASES.items():
    _function.__name__ = _name
    row(around(_middle), **PARTS)(_function)


def rows_masked_out() -> Tensor:
    return torch.ones(64, 64).tril().index_fill(0, torch.arange(0, 64, 2), 0.0)


@row(around(0), rows_masked_out, **PARTS)
def masked(m: Any, x: Tensor, keep: Tensor) -> Tensor:
    """Attention of which some rows are masked out entirely."""
    scores = m.fc(x) @ m.other(x).T + (1 - keep) * -1e4
    return scores.softmax(-1) @ x


@row(lambda: torch.randn(64, WIDTH) * 1e-6, **PARTS)
def small(m: Any, x: Tensor) -> Tensor:
    return m.fc(x * 1e6) + 1e3


@row(lambda: torch.arange(64), **PARTS)
def looked_up(m: Any, i: Tensor) -> Tensor:
    return m.fc(m.norm(m.table(i) + m.mean))


# -- a bias that a softmax does not feel: its gradient is 0, and noise -----------------


def shifted(x: Tensor, dim: int) -> Tensor:
    powers = (x - x.amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)


def convolved(m: Any, x: Tensor) -> Tensor:
    """A layer over rows that lie in columns: its bias shifts whole rows."""
    return F.conv1d(x.T, m.fc.weight[:, :, None], m.fc.bias)


@row(around(0), **PARTS)
def softmax_of_columns(m: Any, x: Tensor) -> list[Tensor]:
    masked = convolved(m, x).masked_fill(x.T > 1, -1e4)
    scores = convolved(m, x) / 2
    powers = (scores - scores.max(-1)[0].unsqueeze(-1)).exp()
    largest_first = powers / powers.sum(-1, keepdim=True)
    return [
        each * x.T
        for each in (shifted(convolved(m, x), -1), shifted(masked, -1), largest_first)
    ]


@row(around(0), **PARTS)
def attended(m: Any, x: Tensor) -> Tensor:
    """Attention whose weights are normed over the queries as well."""
    weights = shifted(m.other(x) @ m.fc(x).T / 4, -1)
    return (weights / (weights.sum(0, keepdim=True) + 1e-6)) @ x


# -- data beyond the range of fp16, rounded after they are in range --------------------


def beyond() -> Tensor:
    return (1 + torch.rand(64, WIDTH)) * 5e5


BEYOND: dict[str, Callable[..., Any]] = {
    "scaled": lambda m, x: m.fc(x * 1e-6),
    "norm": lambda m, x: m.fc(m.norm(x)),
    "batch": lambda m, x: m.fc(F.batch_norm(x, None, None, training=True)),
    "softmax": lambda m, x: m.fc(torch.softmax(x * 1e-6, -1)),
    "moved": lambda m, x: m.fc(torch.cat([x, x], 1)[:, 1 : WIDTH + 1].relu() * 1e-6),
    "stream": lambda m, x: m.fc(m.norm(x + m.other(x / 5e5))),
    "buffer": lambda m, x: m.other((m.fc(x * 1e-6) - m.mean * 50) * 1e-6),
}


@row(beyond, **PARTS)
def beyond_the_range(m: Any, x: Tensor) -> list[Tensor]:
    return [function(m, x) for function in BEYOND.values()]


# -- recurrent layers, whose state is as wide as under autocast ------------------------


class Recurrent(nn.Module):
    """Recurrent layers over a sequence, and cells stepped over it."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.through(layer, x) for layer in self.layers.values()]

    def through(self, layer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(layer, nn.RNNBase):
            return layer(x)[0]
        h = x.new_zeros(x.shape[1], WIDTH)
        state: Any = (h, h) if isinstance(layer, nn.LSTMCell) else h
        seen = []
        for step in x:
            state = layer(step, state)
            seen.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(seen)


SIZE = WIDTH, WIDTH
SEQUENCE = (6, 8, WIDTH)
RECURRENT: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "gated units": {
        "plain": lambda: nn.GRU(*SIZE),
        "deep": lambda: nn.GRU(*SIZE, 2, bidirectional=True),
        "computed": lambda: weight_norm(nn.GRU(*SIZE), "weight_hh_l0"),
    },
    "plain units": {
        "plain": lambda: nn.RNN(*SIZE),
        "computed": lambda: weight_norm(nn.RNN(*SIZE), "weight_hh_l0"),
        "deep": lambda: nn.RNN(*SIZE, 2, "relu", bidirectional=True),
    },
    "cells": {
        "gru": lambda: nn.GRUCell(*SIZE),
        "lstm": lambda: nn.LSTMCell(*SIZE),
        "rnn": lambda: nn.RNNCell(*SIZE),
    },
}

LSTM: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.LSTM(*SIZE),
    "deep": lambda: nn.LSTM(*SIZE, 2, bidirectional=True),
}

for _name, _layers in RECURRENT.items():
    _kind: Any = type(_name, (Recurrent,), {"__module__": __name__})
    row(SEQUENCE, **_layers)(_kind)
