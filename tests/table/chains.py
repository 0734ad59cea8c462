"""Chains that are one kernel in one place, and chains that are seen from outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.spelled.chains import C, gelu_new
from tests.table.rows import linear, row

WIDTH = 32
BETWEEN: dict[str, Any] = {"first": linear(WIDTH), "second": linear(WIDTH, 8)}


@row((4, WIDTH), **BETWEEN, kernels=("gelu_tanh",))
def between(m: Any, x: Tensor) -> Tensor:
    return m.second(gelu_new(m.first(x)))


@row((4, WIDTH), **BETWEEN, kernels=("gelu_tanh",))
def checkpointed(m: Any, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return m.second(gelu_new(m.first(x)))

    return checkpoint(inner, x, use_reentrant=False)


@row((4, WIDTH), **BETWEEN, kernels=())
def seen_inside(m: Any, x: Tensor) -> Any:
    x = m.first(x)
    inner = torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))
    return m.second(0.5 * x * (1.0 + inner)), inner


@row((4, WIDTH), **BETWEEN, kernels=())
def in_a_region(m: Any, x: Tensor) -> Tensor:
    x = m.first(x)
    with torch.autocast("cpu", enabled=False):
        x = gelu_new(x)
    return m.second(x)


@row((4, WIDTH), **BETWEEN, kernels=())
def written_between(m: Any, x: Tensor) -> Tensor:
    """The tensor that the chain reads is written to, by another name, in its midst."""
    x = m.first(x)
    other = x.view(-1)
    before = x * 1.0
    other.add_(1.0)
    return m.second(before * torch.sigmoid(x))


def exps(x: Tensor) -> Tensor:
    powers = torch.exp(x)
    return powers / powers.sum(-1, keepdim=True)


@row((4, WIDTH), **BETWEEN, kernels=())
def result_written(m: Any, x: Tensor) -> Tensor:
    """Torch's softmax needs its result in the backward; a quotient does not."""
    weights = exps(m.first(x))
    weights.mul_(2.0)
    return m.second(weights)


@row((4, WIDTH), **BETWEEN)
def result_returned(m: Any, x: Tensor) -> Tensor:
    return exps(m.second(m.first(x)))
