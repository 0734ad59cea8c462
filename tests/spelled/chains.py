"""Chains that torch has one kernel for, as libraries write them, and what is near.

Each is a function of a tensor and, where it takes them, of a weight and a bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.spelled.layers import WIDTH, Layer, Spelling

C = math.sqrt(2 / math.pi)


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def squares(x: Tensor) -> Tensor:
    return mean(x.square())


def variance(x: Tensor) -> Tensor:
    return x.var(-1, keepdim=True, unbiased=False)


def moved(x: Tensor) -> Tensor:
    return x - mean(x)


def standard(x: Tensor, eps: float = 1e-5) -> Tensor:
    return moved(x) / torch.sqrt(moved(x).pow(2).mean(-1, keepdim=True) + eps)


def exps(x: Tensor) -> Tensor:
    return torch.exp(x - x.amax(-1, keepdim=True))


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def softmax(x: Tensor) -> Tensor:
    return torch.exp(x) / total(torch.exp(x))


def log_sum(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1, keepdim=True)


def by_tanh(x: Tensor, inner: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(inner))


def by_erf(x: Tensor, inner: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(inner))


def rounded(x: Tensor) -> Tensor:
    """To whole numbers, by a number so large that fp32 has no fractions beside it."""
    return (x + 1.5 * 2**23) - 1.5 * 2**23


def cubic(x: Tensor, by: float = 0.044715) -> Tensor:
    return x + by * x**3


Function = Callable[..., Tensor]

BY_KERNEL: dict[str, dict[str, Function]] = {
    "gelu_tanh": {
        "gelu_new": gelu_new,
        "gelu_fast": gelu_fast,
        # BLOOM's and Megatron's, with a constant of eight digits
        "gelu_bloom": lambda x: by_tanh(x, 0.79788456 * x * (1 + 0.044715 * x * x)),
        "gelu_by_sigmoid": lambda x: x * torch.sigmoid(2 * C * cubic(x)),
    },
    "gelu": {
        "gelu_erf": lambda x: by_erf(x, x / math.sqrt(2.0)),
        "gelu_erf_last": lambda x: (torch.erf(x * 2**-0.5) + 1) * x / 2,
        "gelu_eight_digits": lambda x: by_erf(x, 0.70710678 * x),
    },
    "silu": {
        "swish": lambda x: x * torch.sigmoid(x),
        "swish_by_exp": lambda x: x / (1 + torch.exp(-x)),
        "swish_by_reciprocal": lambda x: x * (1 + (-x).exp()).reciprocal(),
    },
    "mish": {
        "mish": lambda x: x * torch.tanh(F.softplus(x)),
    },
    "softmax": {
        "softmax": softmax,
        "softmax_by_logsumexp": lambda x: torch.exp(x - log_sum(x)),
    },
    "log_softmax": {
        "log_softmax": lambda x: x - log_sum(x),
        "log_softmax_by_sum": lambda x: x - total(torch.exp(x)).log(),
    },
    "layer_norm": {
        # BERT's
        "layer_norm": lambda x, w, b: w * standard(x, 1e-12) + b,
        "layer_norm_var": lambda x, w, b: (
            moved(x) * torch.rsqrt(variance(x) + 1e-12) * w + b
        ),
        "layer_norm_power": lambda x, w: (
            w * moved(x) * mean(moved(x) ** 2).add(1e-6) ** -0.5
        ),
        "layer_norm_by_correction": lambda x, w, b: (
            moved(x) / (torch.var(x, -1, correction=0, keepdim=True) + 1e-5) ** 0.5 * w
            + b
        ),
    },
    "rms_norm": {
        "rms_llama": lambda x, w: w * rms(x.to(torch.float32)).to(x.dtype),
        "rms_t5": lambda x, w: w * (x * torch.rsqrt(squares(x.float()) + 1e-6)),
        # Gemma's: the weight is around 0
        "rms_gemma": lambda x, w: rms(x.float()) * (1.0 + w.float()),
        "rms_by_division": lambda x, w: w * x / torch.sqrt(mean(x * x) + 1e-5),
        "rms_by_power": lambda x: x * (squares(x) + 1e-6).pow(-0.5),
        "rms_mamba": lambda x, w: x * (1 / torch.sqrt(squares(x) + 1e-5)) * w,
        "rms_epsilon_of_fp32": lambda x, w: rms(x, torch.finfo(torch.float32).eps) * w,
        "rms_without_epsilon": lambda x: x / torch.sqrt(mean(x * x)),
    },
}
"""How libraries write what torch has one kernel for."""

SPELLINGS: dict[str, tuple[str, Function]] = {
    name: (kernel, function)
    for kernel, functions in BY_KERNEL.items()
    for name, function in functions.items()
}


def scattered(x: Tensor) -> Tensor:
    """PyG's softmax over the edges of a node: by index, with 1e-16 in the sum."""
    index = torch.arange(x.shape[-1]) // 8
    at = index.expand_as(x)
    high = torch.zeros_like(x[..., :4]).scatter_reduce(-1, at, x.detach(), "amax")
    powers = (x - high[..., index]).exp()
    sums = torch.zeros_like(powers[..., :4]).scatter_add(-1, at, powers) + 1e-16
    return powers / sums[..., index]


WRITTEN: dict[str, Function] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    # the Annotated Transformer's norm
    "annotated": lambda x, w, b: w * moved(x) / (x.std(-1, keepdim=True) + 1e-6) + b,
    # x-transformers' RMSNorm before `F.normalize`
    "rms clamped": lambda x, w: (
        x / (torch.norm(x, dim=-1, keepdim=True) * WIDTH**-0.5).clamp(min=1e-8) * w
    ),
    "rms outside": lambda x, w: w * x / (squares(x).sqrt() + 1e-13),
    "mamba_gated": lambda x, w: w * rms(x * torch.sigmoid(x) * x, 1e-5),
    "by_tokens": lambda x: (
        (x - x.mean(-2, keepdim=True))
        / (x.var(-2, unbiased=False, keepdim=True) + 1e-5).sqrt()
    ),
    # Miller's "Attention is off by one"
    "softmax off by one": lambda x: torch.exp(x) / (1 + total(torch.exp(x))),
    "softmax and an epsilon": lambda x: exps(x) / (total(exps(x)) + 1e-6),
    "softmax less 20": lambda x: torch.exp(x - 20) / (total(torch.exp(x - 20)) + 1e-6),
    "log_softmax and an epsilon": lambda x: x - torch.log(total(torch.exp(x)) + 1e-6),
    "scattered": scattered,
    "softplus": lambda x: torch.log(1 + torch.exp(x)),
    "tanh": lambda x: 1 - 2 / (torch.exp(2 * x) + 1),
    "relu squared": lambda x: torch.relu(x).square(),
}
"""What libraries write as well, of which the whole is no kernel."""

NEAR: dict[str, Function] = {
    "another dimension": lambda x: (
        x * torch.rsqrt(x.square().mean(-2, keepdim=True) + 1e-6)
    ),
    "softmax of another dimension": lambda x: (
        torch.exp(x) / torch.exp(x).sum(1, keepdim=True)
    ),
    "limited": lambda x: rms(x.clamp(-3, 3)),
    "weight twice": lambda x, w: w * (w * rms(x)),
    # epsilons that are no kernel's
    "softmax above an epsilon": lambda x: exps(x) / total(exps(x)) + 1e-30,
    "rms epsilon before the square": lambda x: x * torch.rsqrt(squares(x + 1e-12)),
    "norm of a negative epsilon": lambda x: rms(x, -1e-12),
    "layer_norm and an epsilon": lambda x: standard(x, 0.0) + 1e-13,
    # constants that are another number
    "gelu of another cubic": lambda x: by_tanh(x, C * cubic(x, 0.0447149)),
    "gelu of another root": lambda x: by_erf(x, x / 1.4142),
    "gelu squared": lambda x: by_erf(x, x * x / math.sqrt(2)),
    "swish of another sign": lambda x: x * torch.sigmoid(-x),
    "swish off by one": lambda x: x / (1.0000002 + torch.exp(-x)),
    "swish of rounded numbers": lambda x: rounded(x) * torch.sigmoid(rounded(x)),
    "mish of half": lambda x: x * torch.tanh(F.softplus(x, beta=0.5)),
    "mish of a threshold": lambda x: x * torch.tanh(F.softplus(x, threshold=8)),
    # sums of something else
    "softmax of two shifts": lambda x: torch.exp(x - 1) / total(torch.exp(x - 2)),
    "softmax squared": lambda x: torch.exp(x) / total(torch.exp(x)).square(),
    "mean of exps": lambda x: torch.exp(x) / mean(torch.exp(x)),
    "log_softmax of half the sum": lambda x: x - log_sum(x) / 2,
    "layer_norm moved once": lambda x: moved(x) * torch.rsqrt(squares(x) + 1e-5),
    "layer_norm of roots": lambda x: (
        moved(x).sqrt().square() / (variance(x) + 1e-5).sqrt()
    ),
    "rms, a mean of a mean": lambda x: (
        x * torch.rsqrt(total(squares(x)) * WIDTH + 1e-6)
    ),
    "rms of a fourth power": lambda x: x * torch.rsqrt(mean(x.pow(4)) + 1e-6),
    "rms times two": lambda x: 2 * rms(x),
    "rms of one too few": lambda x: (
        x * torch.rsqrt(total(x.square()) / (WIDTH - 1) + 1e-6)
    ),
    "rms to another power": lambda x: x * (squares(x) + 1e-6).pow(-0.25),
    "rms and weight added": lambda x, w: rms(x) + w,
    # a norm for real numbers, but in fp32 the kernel overflows where this does not
    "rms of scaled rows": lambda x: (
        (x / x.amax(-1, True)) * torch.rsqrt(squares(x / x.amax(-1, True)))
    ),
}
"""Functions that look like kernels and are none, from their first op to the last."""


def spelling(function: Function, kernel: str = "", **how: bool) -> Spelling:
    """A chain as a layer, which has a weight and a bias for it."""
    count = function.__code__.co_argcount - 1

    def layer(m: Layer, x: Tensor) -> Tensor:
        return function(x, *(m.weight, m.bias)[:count])

    return Spelling(layer, 1, kernel, **how)


def spellings() -> dict[str, Spelling]:
    written = {name: ("", function) for name, function in WRITTEN.items()}
    # The maximum and the cast are no part of the chain: the whole is none.
    gemma = SPELLINGS["rms_gemma"][1]
    written["gemma"] = "rms_norm", lambda x, w: gemma(x, w).type_as(x)
    written["softmax_less_its_maximum"] = (
        "softmax",
        lambda x: softmax(x - x.max(-1, keepdim=True).values),
    )
    return {
        f"chain/{name}": spelling(function, kernel)
        for name, (kernel, function) in (SPELLINGS | written).items()
    }
