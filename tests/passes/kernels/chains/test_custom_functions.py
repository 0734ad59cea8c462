"""Custom autograd Functions become a kernel if both of their graphs are spelled so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from tests.passes.kernels.door import function_recognised
from tests.spelled.backwards import BACKWARDS

C = math.sqrt(2 / math.pi)

Pair = tuple[Callable[..., Any], Callable[..., Any]]


def of_input(result: Callable[[Tensor], Tensor], back: Callable[..., Tensor]) -> Pair:
    """A Function that keeps its input alone."""
    return lambda x: ((result(x),), (x,)), lambda g, x: (back(g, x),)


def kernel(pair: Pair) -> str:
    """The kernel for the graphs that Dynamo would make of a Function, or ""."""
    found = function_recognised(*map(fx.symbolic_trace, pair))
    return found.kernel.name if found else ""


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def swish_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


def bloom(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def bloom_back(g: Tensor, x: Tensor) -> Tensor:
    t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    inner = (1 - t * t) * (0.79788456 + 0.1070322243 * x * x)
    return (0.5 * x * inner + 0.5 * (1 + t)) * g


def mish_back(g: Tensor, x: Tensor) -> Tensor:
    """As timm's MishJitAutoFn writes it."""
    sigmoid, t = torch.sigmoid(x), F.softplus(x).tanh()
    return g.mul(t + x * sigmoid * (1 - t * t))


def keeps_its_sigmoid(x: Tensor) -> Any:
    sigmoid = torch.sigmoid(x)
    return (x * sigmoid,), (x, sigmoid)


KNOWN: dict[str, tuple[str, Pair]] = {
    "swish": ("silu", of_input(swish, lambda g, x: g * swish_slope(x))),
    "swish of timm": (
        "silu",
        of_input(
            lambda x: x.mul(torch.sigmoid(x)),
            lambda g, x: g * (torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x)))),
        ),
    ),
    "swish that keeps its sigmoid": (
        "silu",
        (keeps_its_sigmoid, lambda g, x, s: (g * s * (1 + x * (1 - s)),)),
    ),
    "mish": ("mish", of_input(lambda x: x.mul(F.softplus(x).tanh()), mish_back)),
    "gelu of BLOOM and Megatron": ("gelu_tanh", of_input(bloom, bloom_back)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_functions_that_save_memory_are_kernels(name: str) -> None:
    expected, pair = KNOWN[name]
    assert kernel(pair) == expected


def erf_back(g: Tensor, x: Tensor) -> Tensor:
    bell = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return g * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * bell)


def test_a_backward_that_no_library_writes_is_left_alone() -> None:
    gelu = lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))  # noqa: E731
    assert kernel(of_input(gelu, erf_back)) == ""
    softmax = lambda x: x.exp() / x.exp().sum(-1, keepdim=True)  # noqa: E731
    assert kernel(of_input(softmax, lambda g, x: g * softmax(x))) == ""


HOSTILE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: back for name, back in BACKWARDS.items() if name != "right"},
    "divided by itself": lambda x, g: g * g / g.square().sqrt() * swish_slope(x),
    "with a cubic": lambda x, g: (g + 1e-20 * g * g * g) * swish_slope(x),
    "a hair larger": lambda x, g: g * 1.0000002 * swish_slope(x),
    "of another point": lambda x, g: g * swish_slope(x + 1e-6),
    "written": lambda x, g: g.mul_(1.0) * swish_slope(x),
    "turned": lambda x, g: g.t().t() * swish_slope(x),
    "widened": lambda x, g: g.double() * swish_slope(x),
    "drawn": lambda x, g: torch.dropout(g, 0.0, True) * swish_slope(x),
}
"""Backwards of a function whose forward is SiLU."""


def hostile(name: str) -> Pair:
    return of_input(swish, lambda g, x: HOSTILE[name](x, g))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_backward_that_is_not_the_derivative_is_left_alone(name: str) -> None:
    assert kernel(hostile(name)) == ""


def test_a_forward_that_is_not_what_its_backward_says_is_left_alone() -> None:
    back = lambda g, x: g * swish_slope(x)  # noqa: E731
    assert kernel(of_input(lambda x: x * torch.sigmoid(1.0001 * x), back)) == ""
    assert kernel(of_input(lambda x: swish(x).clamp(-100, 1e9), back)) == ""
    assert kernel(of_input(swish, back)) == "silu"


def test_a_number_that_was_kept_wrongly_is_found() -> None:
    wrong = (keeps_its_sigmoid, lambda g, s, x: (g * s * (1 + x * (1 - s)),))
    assert kernel(wrong) == ""
