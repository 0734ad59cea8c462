"""SiLU as a function with a backward of its own, which may be another function's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.spelled.layers import Layer, Spelling

Backward = Callable[[Tensor, Tensor], Tensor]


def _right(x: Tensor, grad: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return grad * (sigmoid * (1 + x * (1 - sigmoid)))


def custom(backward: Backward) -> Callable[[Layer, Tensor], Tensor]:
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

    return lambda m, x: Swish.apply(x)


BACKWARDS: dict[str, Backward] = {
    "right": _right,
    "straight through": lambda x, grad: grad,
    "of the sigmoid": lambda x, grad: grad * torch.sigmoid(x),
    "normalised": lambda x, grad: _right(x, grad / (grad.norm() + 1e-6)),
    "times itself": lambda x, grad: _right(x, grad * grad),
    "averaged over all": lambda x, grad: _right(x, grad.mean() + 0 * grad),
    "softmax": lambda x, grad: _right(x, grad - (grad * x).mean(-1, keepdim=True)),
    "nearly right": lambda x, grad: _right(x, grad) * 1.0001,
    "right and a bit": lambda x, grad: _right(x, grad) + 1e-7,
}


def spellings() -> dict[str, Spelling]:
    return {
        f"custom/{name}": Spelling(custom(backward))
        for name, backward in BACKWARDS.items()
    }
