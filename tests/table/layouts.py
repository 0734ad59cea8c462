"""Convolutions that run with the channels last, and results that nobody sees moved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.table.rows import linear, row

IMAGE = (4, 3, 64, 64)
"""A smaller image gains less than a change of its layout costs."""


def conv(inside: int, outside: int, *rest: Any, **given: Any) -> Any:
    return lambda: nn.Conv2d(inside, outside, *rest, **given)


def block(inside: int, outside: int) -> Any:
    """A convolution, a norm, and an activation in place."""
    return lambda: nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


@row(IMAGE, first=block(3, 8), second=block(8, 8), head=linear(8, 5))
def residual_blocks(m: Any, x: Tensor) -> Tensor:
    x = F.max_pool2d(m.first(x), 2)
    x = x + m.second(x)
    return m.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


@row(
    IMAGE,
    into=block(3, 8),
    down=block(8, 16),
    up=lambda: nn.ConvTranspose2d(16, 8, 2, 2),
    out=conv(16, 4, 1),
)
def u_net(m: Any, x: Tensor) -> Tensor:
    x = m.into(x)
    below = m.down(F.avg_pool2d(x, 2))
    return m.out(torch.cat((m.up(below), x), 1))


@row(IMAGE, image=block(3, 8), head=linear(8 * 64 * 64, 5))
def viewed_as_a_row(m: Any, x: Tensor) -> Tensor:
    x = m.image(x)
    return m.head(x.view(x.shape[0], -1))


@row(
    IMAGE,
    widen=conv(3, 12, 1),
    deep=conv(12, 12, 3, padding=1, groups=12),
    gate=conv(12, 12, 1),
    narrow=conv(12, 6, 1),
)
def gated_depthwise(m: Any, x: Tensor) -> Tensor:
    x = F.hardswish(m.deep(F.relu6(m.widen(x))))
    return m.narrow(x * torch.sigmoid(m.gate(F.adaptive_avg_pool2d(x, 1))))


@row(
    IMAGE,
    first=lambda: nn.Conv3d(3, 8, 3, padding=1),
    second=lambda: nn.Conv3d(8, 4, 3),
)
def volumes(m: Any, x: Tensor) -> Tensor:
    return m.second(F.gelu(m.first(x[:, :, None].expand(-1, -1, 5, -1, -1))))


@row(IMAGE, first=conv(3, 8, 3), same=conv(8, 8, 3, padding=1))
def weight_read_as_numbers_too(m: Any, x: Tensor) -> Any:
    x = m.same(F.relu(m.same(F.relu(m.first(x)))))
    return x, F.linear(x.mean((2, 3)), m.same.weight[:, :, 1, 1])


def three_blocks() -> nn.Sequential:
    return nn.Sequential(*(block(8, 8)() for _ in range(3)))


@row(
    IMAGE,
    first=block(3, 8),
    second=block(8, 8),
    third=three_blocks,
    head=linear(8, 5),
)
def checkpointed_blocks(m: Any, x: Tensor) -> Tensor:
    x = checkpoint(m.first, x, use_reentrant=False)
    return m.head(m.third(x + m.second(x)).mean((2, 3)))


@row(
    IMAGE,
    stem=conv(3, 8, 4, 4),
    deep=conv(8, 8, 3, padding=1, groups=8),
    down=conv(8, 16, 2, 2),
    norm=lambda: nn.LayerNorm(8),
    wide=linear(8, 32),
    narrow=linear(32, 8),
)
def conv_next(m: Any, x: Tensor) -> Tensor:
    x = m.norm(m.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    inside = m.norm(m.deep(x).permute(0, 2, 3, 1))
    inside = m.narrow(F.gelu(m.wide(inside)))
    return m.down(x + inside.permute(0, 3, 1, 2)).mean((2, 3))


@row(IMAGE, stem=conv(3, 8, 4, 4), norm=lambda: nn.LayerNorm(8))
def patches_of_swin(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.stem(x).flatten(2).transpose(1, 2))


@row(IMAGE, blocks=block(3, 8), mix=linear(8), last=conv(8, 4, 3))
def channels_put_last_by_a_permutation(m: Any, x: Tensor) -> Tensor:
    x = F.max_pool2d(m.blocks(x), 2)
    return m.last(m.mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).mean()


@row(IMAGE, image=conv(3, 8, 3))
def rows_that_are_read_otherwise(m: Any, x: Tensor) -> Any:
    rows = m.image(x).permute(0, 2, 3, 1)
    normed = F.layer_norm(rows, [8]) + rows
    return rows.softmax(-1), rows * 2, normed, F.linear(rows[0, 0], rows[0, 1])


@row(IMAGE, image=conv(3, 8, 3))
def rows_returned(m: Any, x: Tensor) -> Tensor:
    return m.image(x).permute(0, 2, 3, 1).flatten(0, 1)


@row(IMAGE, image=conv(3, 8, 3), fc=linear(62))
def rows_that_one_layout_copies(m: Any, x: Tensor) -> Any:
    """They are a view in torch's layout, and a later write shows in them."""
    with torch.no_grad():
        seen = m.image(x)
        rows = seen.permute(3, 0, 1, 2).reshape(seen.shape[3], seen.shape[0], -1)
        seen.mul_(rows.new_tensor(3.0)).add_(torch.arange(seen.shape[2])[:, None])
    return F.layer_norm(rows, rows.shape[-1:]), m.fc(
        x.mean((2, 3))[:, :1].expand(4, 62)
    )


@row(
    lambda: torch.randn(IMAGE).to(memory_format=torch.channels_last), conv=conv(3, 8, 3)
)
def layout_of_the_users(m: Any, x: Tensor) -> Tensor:
    return m.conv(x).relu()


@row(
    (2, 6, 32),
    all=linear(32, 96),
    out=linear(32),
    low=("scaled_dot_product_attention",),
)
def attention_of_nano_gpt(m: Any, x: Tensor) -> Tensor:
    """The layout of its kernel's result makes `contiguous` do nothing in a trace."""
    b, t, c = x.shape
    q, k, v = (y.view(b, t, 4, 8).transpose(1, 2) for y in m.all(x).split(c, dim=2))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(y.transpose(1, 2).contiguous().view(b, t, c))
