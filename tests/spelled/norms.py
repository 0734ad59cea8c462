"""Norms and softmaxes, as libraries write them out, with and without an epsilon."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.spelled.layers import WIDTH, Layer, Spelling

Function = Callable[[Layer, Tensor], Tensor]

# -- norms ----------------------------------------------------------------------------


def annotated(m: Layer, x: Tensor) -> Tensor:
    """The Annotated Transformer's: the unbiased deviation and an epsilon outside."""
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    return m.weight * (x - mean) / (std + 1e-6) + m.bias


def bert_norm(m: Layer, x: Tensor) -> Tensor:
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    return m.weight * ((x - u) / torch.sqrt(s + 1e-12)) + m.bias


def lucidrains(m: Layer, x: Tensor) -> Tensor:
    var = torch.var(x, dim=-1, unbiased=False, keepdim=True)
    mean = torch.mean(x, dim=-1, keepdim=True)
    return (x - mean) * (var + 1e-5).rsqrt() * m.weight + m.bias


def by_squares(m: Layer, x: Tensor) -> Tensor:
    """The variance as the mean square less the square of the mean."""
    mean = x.mean(-1, keepdim=True)
    var = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) / (var + 1e-5).sqrt() * m.weight + m.bias


def llama_norm(m: Layer, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.weight * h.to(x.dtype)


def t5_norm(m: Layer, x: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return m.weight * (x * torch.rsqrt(variance + 1e-6))


def gemma_norm(m: Layer, x: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + m.bias.float())).type_as(x)


def rms_outside(m: Layer, x: Tensor) -> Tensor:
    """The epsilon beside the root: no `rms_norm` of torch's."""
    return m.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-13)


def rms_clamped(m: Layer, x: Tensor) -> Tensor:
    """x-transformers' RMSNorm before `F.normalize`."""
    norm = torch.norm(x, dim=-1, keepdim=True) * WIDTH**-0.5
    return x / norm.clamp(min=1e-8) * m.weight


def rms_large(m: Layer, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.0) * m.weight


def rms_two(m: Layer, x: Tensor) -> Tensor:
    """Two epsilons."""
    mean = x.pow(2).mean(-1, keepdim=True) + 1e-6
    return x / (mean.sqrt() + 1e-12) * m.weight


def mamba_gated(m: Layer, x: Tensor) -> Tensor:
    h = x.float() * torch.sigmoid(x.float()) * x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (m.weight * h).to(x.dtype)


def by_tokens(m: Layer, x: Tensor) -> Tensor:
    """A written norm over the tokens."""
    mean = x.mean(1, keepdim=True)
    return (x - mean) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()


NORMS: dict[Function, str] = {
    annotated: "",
    bert_norm: "layer_norm",
    lucidrains: "layer_norm",
    llama_norm: "rms_norm",
    t5_norm: "rms_norm",
    gemma_norm: "rms_norm",
    rms_large: "rms_norm",
    **dict.fromkeys(
        (by_squares, rms_outside, rms_clamped, rms_two, mamba_gated, by_tokens), ""
    ),
}

# -- softmaxes and their logarithms ---------------------------------------------------


def over_sum(shift: Callable[[Tensor], Tensor], eps: float = 0.0) -> Function:
    def function(m: Layer, x: Tensor) -> Tensor:
        powers = torch.exp(shift(x))
        total = powers.sum(-1, keepdim=True)
        return powers / (total + eps if eps else total)

    return function


def largest(x: Tensor) -> Tensor:
    return x - x.max(-1, keepdim=True).values


def largest_detached(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True).detach()


def off_by_one(m: Layer, x: Tensor) -> Tensor:
    """Softmax with a 1 in the sum, of Miller's "Attention is off by one"."""
    powers = torch.exp(x)
    return powers / (1 + powers.sum(-1, keepdim=True))


def by_logsumexp(m: Layer, x: Tensor) -> Tensor:
    return torch.exp(x - torch.logsumexp(x, -1, keepdim=True))


def log_of_softmax(m: Layer, x: Tensor) -> Tensor:
    return torch.log(torch.exp(x) / torch.exp(x).sum(-1, keepdim=True))


def less_logsumexp(m: Layer, x: Tensor) -> Tensor:
    return x - torch.logsumexp(x, -1, keepdim=True)


def less_log_sum(m: Layer, x: Tensor) -> Tensor:
    return x - torch.exp(x).sum(-1, keepdim=True).log()


def less_log_sum_eps(m: Layer, x: Tensor) -> Tensor:
    return x - torch.log(torch.exp(x).sum(-1, keepdim=True) + 1e-6)


def scattered(m: Layer, x: Tensor) -> Tensor:
    """PyG's softmax over the edges of a node: by index, with 1e-16 in the sum."""
    index = torch.arange(x.shape[-1]) // 8
    at = index.expand_as(x)
    high = torch.zeros_like(x[..., :4]).scatter_reduce(-1, at, x.detach(), "amax")
    powers = (x - high[..., index]).exp()
    total = torch.zeros_like(powers[..., :4]).scatter_add(-1, at, powers) + 1e-16
    return powers / total[..., index]


SOFTMAXES: dict[str, tuple[Function, str]] = {
    "plain": (over_sum(lambda x: x), "softmax"),
    "largest": (over_sum(largest), "softmax"),
    "detached": (over_sum(largest_detached), ""),
    "less 20, 1e-6": (over_sum(lambda x: x - 20, 1e-6), ""),
    "less 80": (over_sum(lambda x: x - 80.0), ""),
    "largest, 1e-6": (over_sum(largest, 1e-6), ""),
    "plain, 1e-9": (over_sum(lambda x: x, 1e-9), ""),
    "off by one": (off_by_one, ""),
    "log of softmax": (log_of_softmax, ""),
    "by logsumexp": (by_logsumexp, "softmax"),
    "less logsumexp": (less_logsumexp, "log_softmax"),
    "less log sum": (less_log_sum, "log_softmax"),
    "less log sum, 1e-6": (less_log_sum_eps, ""),
    "scattered": (scattered, ""),
}


def spellings() -> dict[str, Spelling]:
    norms = {f"norm/{f.__name__}": Spelling(f, 1, k) for f, k in NORMS.items()}
    return norms | {
        f"softmax/{name}": Spelling(function, 1, kernel)
        for name, (function, kernel) in SOFTMAXES.items()
    }
