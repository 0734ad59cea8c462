"""Programs whose meaning is easily lost: writes, bits, copies and views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.table.rows import linear, row

NOT_EXPORTED = {"exported": "torch.export takes no such write"}
WHOLE = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


@row((4, 8), fc=linear(8), without=NOT_EXPORTED)
def weight_written_by_detach(m: Any, x: Tensor) -> Tensor:
    before = F.linear(x, m.fc.weight.detach().clone())
    m.fc.weight.detach().mul_(3.0)
    return m.fc(x) - before


@row((4, 8), fc=linear(8), without=NOT_EXPORTED)
def weight_written_by_data(m: Any, x: Tensor) -> Tensor:
    m.fc.weight.data.mul_(3.0)
    return m.fc(x)


@row((4, 8), fc=linear(8), other=linear(8), without=NOT_EXPORTED)
def activation_written_by_data(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc(x)
    hidden.data.mul_(3.0)
    return m.other(hidden)


@row((4, 8), fc=linear(8), other=linear(8))
def bits_of_an_activation(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc(x)
    bits = hidden.view(WHOLE[hidden.dtype]).bitwise_not()
    return m.other(bits.bitwise_not().view(hidden.dtype))


@row((16, 8), fc=linear(8), norm=lambda: nn.BatchNorm1d(8), other=linear(8))
def batch_norm_in_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    def region(a: Tensor) -> Tensor:
        return torch.relu(m.norm(m.fc(a)))

    return m.other(checkpoint(region, x, use_reentrant=False))


@row((4, 8), fc=linear(8), other=linear(8))
def mask_made_in_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    """Stand-ins of the verifier have a device of their own in the region, too."""

    def masked(x: Tensor) -> Tensor:
        ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        return (m.fc(x) @ m.other(x).t()).masked_fill(ahead, 0.0)

    result: Tensor = checkpoint(masked, x, use_reentrant=False)
    return result


@row((2, 8), fc=linear(8))
def drawn_below_autograd(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc(x)
    line = torch.linspace(hidden[0, 0], hidden[0, 1], 8)
    return hidden + torch.randint_like(hidden, 3) + line


@row((6, 3, 8, 8), conv=lambda: nn.Conv2d(3, 4, 3, padding=1), fc=linear(4, 5))
def noisy(m: Any, x: Tensor) -> Any:
    hidden = m.conv(x).relu_()
    hidden = F.dropout2d(hidden, 0.4) + F.dropout(hidden, 0.4)
    hidden = m.fc(hidden.mean((2, 3)) + 0.1 * torch.randn(6, 4))
    return hidden, F.cross_entropy(hidden, torch.arange(6) % 5)


@row(
    (32, 8),
    norm=lambda: nn.BatchNorm1d(8),
    hidden=linear(8, 16),
    out=linear(16, 1),
    mean=lambda: torch.tensor(250_000.0),
    spread=lambda: torch.tensor(40_000.0),
)
def denormalised(m: Any, x: Tensor) -> Tensor:
    """A regressor of prices: a large number that is added last has no low digits."""
    return m.out(F.silu(m.hidden(m.norm(x * 500 + 1e4)))) * m.spread + m.mean


# -- a write to a copy reaches nothing else --------------------------------------------

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda h: h[:, :4].reshape(-1),
    "contiguous": lambda h: h[:, :4].contiguous(),
    "flatten": lambda h: h[:, :4].float().flatten(),
    "expand": lambda h: h[:1].expand(4, 8).contiguous()[:, :4],
    "to": lambda h: h[:, :4].to(torch.bfloat16),
}
"""Ops that copy by the layout of what they read, which a cast lays out anew."""


def _copying(name: str, copied: Callable[[Tensor], Tensor], *, low: bool) -> None:
    def program(m: Any, x: Tensor) -> Any:
        h = m.fc(x) if low else x.clone()
        early = m.narrow(h[:, :4])
        copy = copied(h)
        copy.neg_()
        late = m.narrow(h[:, :4]) + h[:, :4].sum()
        return early, m.narrow(copy.to(x.dtype).view(4, 4)), late, copy

    program.__name__ = f"written_{name}_of_{'a product' if low else 'an input'}"
    row((4, 8), fc=linear(8), narrow=linear(4, 8))(program)


for _name, _copied in COPIES.items():
    _copying(_name, _copied, low=False)
    if _name != "to":  # under autocast that is no copy, but the product itself
        _copying(_name, _copied, low=True)


# -- views and writes that a caller sees -----------------------------------------------


@row((4, 8), fc=linear(8))
def views_of_an_input_and_of_a_product(m: Any, x: Tensor) -> Any:
    rows = x.view(2, 2, 8).unbind(0)
    h = m.fc(rows[0])
    turned = h.t()
    product = m.fc(rows[1]) @ turned
    return rows[1][0], product, turned[:4], h.detach()[0]


@row(
    (4, 8),
    (4, 8),
    fc=lambda: nn.Linear(8, 8).requires_grad_(False),
    cache=lambda: torch.zeros(2, 4, 8),
)
def written_everywhere(m: Any, x: Tensor, y: Tensor) -> Any:
    """Each line of it is a write through something else."""
    before = m.fc(x)  # a cast of x, read before the write ...
    x.mul_(2)
    after = m.fc(x)  # ... and after it
    left, right = before.split(4, -1)
    rows = after.unbind(0)
    y[1:3] = rows[0].detach()
    y[:, 0] += 1
    m.cache[0] = after.detach()
    m.cache.view(-1)[:8].copy_(rows[1].detach())
    kept = m.cache.sum(0)
    return left + right, after, after[1:], y, y.t(), x, m.cache, kept
