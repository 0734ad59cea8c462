"""Activations and rotary embeddings, written out and as functions with a backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.spelled.layers import Layer, Spelling

C = math.sqrt(2 / math.pi)


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))


def softplus_log(x: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(x))


PLAIN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "gelu_new": (gelu_new, "gelu_tanh"),
    "gelu_fast": (gelu_fast, "gelu_tanh"),
    "gelu_erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
    "gelu_cubic": (
        lambda x: x * torch.sigmoid(2 * C * (x + 0.044715 * x**3)),
        "gelu_tanh",
    ),
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x), ""),
    "gelu_eps": (lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5) + 1e-7), ""),
    "swish": (lambda x: x * torch.sigmoid(x), "silu"),
    "swish_exp": (lambda x: x / (1 + torch.exp(-x)), "silu"),
    "swish_eps": (lambda x: x / (1 + torch.exp(-x) + 1e-8), ""),
    "swish_tanh": (lambda x: 0.5 * x * (1 + torch.tanh(0.5 * x)), ""),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), "mish"),
    "mish_log": (lambda x: x * torch.tanh(softplus_log(x)), ""),
    "softplus_log": (softplus_log, ""),
    "tanh_exp": (lambda x: 1 - 2 / (torch.exp(2 * x) + 1), ""),
    "sigmoid_exp": (lambda x: 1 / (1 + torch.exp(-x)), ""),
    "relu2": (lambda x: torch.relu(x).square(), ""),
    "swish_of_halves": (
        lambda x: torch.cat([x * torch.sigmoid(x), x], -1)[..., :32],
        "",
    ),
}


# -- functions with a backward of their own -------------------------------------------

Backward = Callable[[Tensor, Tensor], Tensor]


def _right(x: Tensor, grad: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return grad * (sigmoid * (1 + x * (1 - sigmoid)))


def custom(backward: Backward) -> Callable[[Tensor], Tensor]:
    """SiLU whose backward is `backward`."""

    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return backward(x, grad)

    return Swish.apply


BACKWARDS: dict[str, Backward] = {
    "right": _right,
    "straight through": lambda x, grad: grad,
    "of the sigmoid": lambda x, grad: grad * torch.sigmoid(x),
    "normalised": lambda x, grad: _right(x, grad / (grad.norm() + 1e-6)),
    "times itself": lambda x, grad: _right(x, grad * grad),
    "cubed": lambda x, grad: _right(x, grad**3),
    "tanh": lambda x, grad: _right(x, grad.tanh()),
    "averaged over all": lambda x, grad: _right(x, grad.mean() + 0 * grad),
    "softmax": lambda x, grad: _right(x, grad - (grad * x).mean(-1, keepdim=True)),
    "nearly right": lambda x, grad: _right(x, grad) * 1.0001,
    "right and a bit": lambda x, grad: _right(x, grad) + 1e-7,
    "squared": lambda x, grad: _right(x, grad * grad.abs()),
    "averaged": lambda x, grad: _right(x, grad.mean(-1, keepdim=True).expand_as(grad)),
    "clipped": lambda x, grad: _right(x, grad.clamp(-0.5, 0.5)),
    "less its mean": lambda x, grad: _right(x, grad - grad.mean()),
    "of another input": lambda x, grad: _right(x.flip(0), grad),
    "scaled where large": lambda x, grad: _right(
        x, torch.where(x > 8, 0.5, 1.0) * grad
    ),
    "zero where far": lambda x, grad: _right(x, grad) * (x.abs() < 20),
}

# -- rotary embeddings ----------------------------------------------------------------


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
    "less": lambda x, cos, sin: x * cos - halves(x) * sin,
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


def of(function: Callable[[Tensor], Tensor]) -> Callable[[Layer, Tensor], Tensor]:
    return lambda m, x: function(x)


def spellings() -> dict[str, Spelling]:
    found = {
        f"activation/{name}": Spelling(of(function), 1, kernel)
        for name, (function, kernel) in PLAIN.items()
    }
    for name, backward in BACKWARDS.items():
        found[f"custom/{name}"] = Spelling(of(custom(backward)))
    for name, embed in ROTARY.items():
        found[f"rotary/{name}"] = Spelling(turned(embed), 3)
        found[f"rotary alone/{name}"] = Spelling(turned_alone(embed), 1, single=True)
    return found
