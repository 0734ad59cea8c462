"""Branches of one value that cancel: no gradient is less true than autocast's.

Each program computes `a = linear(x)` in low precision, and a difference of two
functions of `a` whose gradients cancel in part.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from tests.quick import each_with_one

SEEDS = 8
WIDTH = 16

CANCEL: dict[str, Callable[[Tensor], Tensor]] = {
    # losses as papers write them
    "softplus - a t": lambda a: F.softplus(a) - a * (a.detach() > 0),
    "softplus - soft t": lambda a: F.softplus(a) - a * a.detach().sigmoid(),
    "relu - a t + log1p": lambda a: (
        a.relu() - a * (a.detach() > 0) + torch.log1p((-a.abs()).exp())
    ),
    "logsigmoid + x (1 - t)": lambda a: -F.logsigmoid(a) - a * (a.detach() < 0),
    "focal": lambda a: (1 - a.sigmoid()) ** 2 * (F.softplus(a) - a * (a.detach() > 0)),
    "hinge smoothed": lambda a: F.softplus(1 - a) - (1 - a).clamp(min=0),
    "log cosh": lambda a: a + F.softplus(-2 * a) - math.log(2),
    "log cosh of abs": lambda a: (
        a.abs() + torch.log1p(torch.exp(-2 * a.abs())) - math.log(2)
    ),
    "log cosh less its linear part": lambda a: a.cosh().log() - a.abs(),
    "tanh correction": lambda a: 2 * (math.log(2) - a - F.softplus(-2 * a)),
    "gaussian with tanh": lambda a: (
        -0.5 * a**2 - 2 * (math.log(2) - a - F.softplus(-2 * a))
    ),
    "symlog": lambda a: torch.log(1 + a.abs()) - a.abs(),
    "symlog with sign": lambda a: a.detach().sign() * torch.log1p(a.abs()) - a,
    "pseudo huber": lambda a: (1 + a**2).sqrt() - 1 - a.abs(),
    "pseudo huber less square": lambda a: (1 + a**2).sqrt() - 1 - 0.5 * a**2,
    "huber": lambda a: F.smooth_l1_loss(a, a.detach() * 0, reduction="none") - a.abs(),
    "charbonnier": lambda a: (a**2 + 1e-2).sqrt() - a.abs(),
    "poisson": lambda a: a.exp() - a * (1 + a.detach().abs()),
    "kl": lambda a: a.exp() - 1 - a,
    "kl of gaussians": lambda a: 0.5 * (a.exp() + a**2 - 1 - a),
    "entropy": lambda a: -(a.sigmoid() * F.logsigmoid(a)) - F.softplus(-a),
    "x log x - x": lambda a: (a.abs() + 1) * (a.abs() + 1).log() - a.abs(),
    "logsumexp - target": lambda a: a.logsumexp(-1) - a[..., 0],
    "log softmax by hand": lambda a: a - a.logsumexp(-1, keepdim=True),
    "log mean exp - mean": lambda a: a.logsumexp(-1) - math.log(WIDTH) - a.mean(-1),
    "margin": lambda a: (
        F.softplus(a[..., :8] - a[..., 8:]) - (a[..., :8] - a[..., 8:]).relu()
    ),
    # functions near the identity, or near each other
    "sin - a": lambda a: a.sin() - a,
    "tanh - a": lambda a: a.tanh() - a,
    "expm1 - a": lambda a: a.expm1() - a,
    "exp - a": lambda a: a.exp() - a,
    "log1p - a": lambda a: a.abs().log1p() - a.abs(),
    "atan - a": lambda a: a.atan() - a,
    "asinh - a": lambda a: a.asinh() - a,
    "sinh - a": lambda a: a.sinh() - a,
    "tan - a": lambda a: (a / 4).tan() - a / 4,
    "erf - a": lambda a: torch.erf(a) - 2 / math.sqrt(math.pi) * a,
    "sqrt": lambda a: (1 + a.abs()).sqrt() - 0.5 * a.abs(),
    "rsqrt": lambda a: (1 + a.abs()).rsqrt() + 0.5 * a.abs(),
    "reciprocal": lambda a: (1 + a.abs()).reciprocal() + a.abs(),
    "pow": lambda a: (1 + a.abs()).pow(1.5) - 1.5 * a.abs(),
    "cos": lambda a: a.cos() - 1 + 0.5 * a * a,
    "snake": lambda a: a + a.sin() ** 2 - a.abs(),
    "sin - tanh": lambda a: a.sin() - a.tanh(),
    "exp - cosh": lambda a: a.exp() - a.cosh() - a.sinh() * 0.9,
    # activations
    "softplus - relu": lambda a: F.softplus(a) - a.relu(),
    "softplus - a": lambda a: F.softplus(a) - a,
    "mish - a": lambda a: F.mish(a) - a,
    "silu - relu": lambda a: F.silu(a) - a.relu(),
    "gelu - relu": lambda a: F.gelu(a) - a.relu(),
    "gelu - silu": lambda a: F.gelu(a) - F.silu(a),
    "elu - a": lambda a: F.elu(a) - a,
    "softsign - tanh": lambda a: F.softsign(a) - a.tanh(),
    "sigmoid - tanh": lambda a: a.sigmoid() - 0.5 * (a / 2).tanh() - 0.1 * a,
    # rows
    "softmax - a": lambda a: a.softmax(-1) - a / WIDTH,
    "norm - a": lambda a: F.layer_norm(a, (WIDTH,)) - a,
    "normalised - a": lambda a: F.normalize(a, dim=-1) - 0.3 * a,
    "less its mean": lambda a: a - a.mean(-1, keepdim=True),
    "less its smoothed": lambda a: a - a.cumsum(-1) / WIDTH,
    "by its standard deviation": lambda a: a / (a.std(-1, keepdim=True) + 1) - a,
    "cosine": lambda a: F.cosine_similarity(a, a.flip(-1), dim=-1) - 0.1 * a.sum(-1),
    # three branches, views, and branches that meet twice
    "three branches": lambda a: F.softplus(a) - a * (a.detach() > 0) + a.relu() - a,
    "through views": lambda a: (
        F.softplus(a.view(-1, WIDTH)).view_as(a) - a.transpose(0, 1).transpose(0, 1)
    ),
    "meets twice": lambda a: (F.softplus(a) - a.relu()) * (a.exp() - a.relu()),
    "a product as well": lambda a: (
        F.softplus(a) - a.relu() + a @ a.detach().mT @ a.detach() * 0.01
    ),
}


class Program(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize(("name", "precision"), each_with_one(CANCEL, ["fp16", "bf16"]))
def test_gradients_that_cancel_are_as_true_as_under_autocast(
    name: str, precision: str
) -> None:
    """CI has each program in one precision, in turn: both have the same rules."""
    function, off = CANCEL[name], torch.autocast("cpu", enabled=False)
    half = precision == "fp16"
    low = torch.float16 if half else torch.bfloat16
    scale = 256.0 if half else 1.0
    options: dict[str, Any] = {"loss_scale": "off"} if half else {}
    ours = autoamp.convert(
        Program(function), precision=low, do_no_harm=False, strict=True, **options
    )
    squares = [torch.zeros(3, dtype=torch.float64) for _ in range(2)]
    for seed in range(SEEDS):
        torch.default_generator.manual_seed(seed)
        plain = Program(function)
        ours.load_state_dict(plain.state_dict())
        x, loss = torch.randn(6, 5, WIDTH), torch.randn(6, 5, WIDTH)
        true = _gradients(copy.deepcopy(plain).double(), x.double(), loss, off, 1.0)
        autocast = torch.autocast("cpu", low)
        for which, (model, mode) in enumerate(((ours, off), (plain, autocast))):
            found = _gradients(model, x, loss, mode, scale)
            errors = [
                (f - t).norm() / t.norm() for f, t in zip(found, true, strict=True)
            ]
            squares[which] += torch.stack(errors) ** 2
    ratio = (squares[0] / squares[1]).sqrt()
    assert ratio.max() <= 1.1, f"x, weight and bias: {ratio.tolist()} of autocast's"


def _gradients(
    model: nn.Module,
    x: Tensor,
    loss: Tensor,
    mode: AbstractContextManager[object],
    scale: float,
) -> list[Tensor]:
    """The gradients of the input, the weight and the bias, unscaled, in fp64."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with mode:
        y = model(x)
    y = y.to(x.dtype)
    direction = loss.to(x.dtype)[..., : y.shape[-1]] if y.dim() == 3 else loss[..., 0]
    (y * direction.to(x.dtype) * scale).sum().backward()
    leaves = (x, *model.parameters())
    return [leaf.grad.double() / scale for leaf in leaves if leaf.grad is not None]
