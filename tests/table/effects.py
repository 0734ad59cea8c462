"""Programs that write, share memory, draw random numbers, or return odd nests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.table.rows import linear, row


@row((4, 8), fc=linear(8))
def written_in_place(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc(x)
    hidden[:, :4].mul_(2)
    hidden.add_(1)
    return m.fc(hidden)


@row((4, 8), fc=linear(8), seen=lambda: torch.zeros(8))
def counted_in_a_buffer(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc(x)
    m.seen.mul_(0.9).add_(hidden.detach().mean(0))
    return hidden


@row((4, 8), (4, 8), fc=linear(8))
def written_input(m: Any, x: Tensor, out: Tensor) -> Tensor:
    out.copy_(m.fc(x))
    return out * 2


@row((4, 8), fc=linear(8))
def views_of_one_result(m: Any, x: Tensor) -> Any:
    hidden = m.fc(x)
    return hidden, hidden[1:], [hidden.t()]


@row((4, 8), fc=linear(8))
def input_returned(m: Any, x: Tensor) -> Any:
    return {"x": x, "y": m.fc(x), "none": None, "name": "y"}


@row((4, 8), fc=linear(8))
def noise_added(m: Any, x: Tensor) -> Tensor:
    return m.fc(x) + torch.rand_like(x)


@row((4, 8), fc=linear(8))
def detached_branch(m: Any, x: Tensor) -> Any:
    hidden = m.fc(x)
    return hidden, hidden.detach().exp()


class Pair(nn.Module):
    """A module of its own, whose parts share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


row((4, 8))(Pair)


@row((4, 8), exact=True)
def whole_numbers(m: Any, x: Tensor) -> Tensor:
    return (x * 4).round() + 1
